# SPDX-License-Identifier: Apache-2.0
"""What meta-learning cannot be combined with is refused in one line that says what would work."""

import pytest

from configs.errors import ConfigError
from settings import loading, validation

TEXT, SINUSOID, GLYPHS, IN_CONTEXT = (
    f"configs/meta_{name}.py" for name in ("text", "sinusoid", "glyphs", "in_context")
)
SHARED = "a task's gradient is that of one device; use --config.mesh.data or --config.mesh.fsdp"


@pytest.mark.parametrize(
    ("recipe", "typed", "message"),
    [
        (TEXT, {"mesh.model": "2"}, rf"mesh.model=1, not 2 \({SHARED}"),
        (TEXT, {"mesh.context": "2"}, rf"mesh.context=1, not 2 \({SHARED}"),
        (TEXT, {"mesh.expert": "2"}, rf"mesh.expert=1, not 2 \({SHARED}"),
        (TEXT, {"meta.method": "maml"}, r"meta.method=maml needs model.attention=reference, not auto \(fused kernels"),
        (
            TEXT,
            {"meta.method": "maml", "model.attention": "reference", "model.quantization": "int8"},
            r"maml needs model.quantization=none, not int8 \(rounded products",
        ),
        (TEXT, {"meta.method": "prototypical"}, "needs meta.method=maml"),
        (TEXT, {"meta.share": "1", "plasticity.method": "redo"}, "meta.share=1.0 leaves none of the .* microbatch"),
        (
            TEXT,
            {"plasticity.measure": "2", "batch.ramp": "steps", "batch.first": "1"},
            "plasticity.measure measures .* leaves none of the 1 of",
        ),
        (TEXT, {"meta.method": "reptile", "meta.inner_steps": "0"}, r"needs meta.inner_steps \(without a step it"),
        (TEXT, {"meta.support": "3"}, "meta.support=3 is not read with train.objective=meta_language_modeling"),
        (SINUSOID, {"meta.support": "20"}, "meta.support=20 leaves no query .* use --config.meta.support=10"),
        (SINUSOID, {"meta.share": "0.5"}, "meta.share=0.5 is not read with train.objective=meta_learning"),
        (
            SINUSOID,
            {"meta.method": "reptile", "meta.learn_rates": "true"},
            "meta.method=maml or first_order_maml, not reptile",
        ),
        (SINUSOID, {"meta.method": "in_context"}, "model.name=vector_decoder"),
        (SINUSOID, {"model.name": "decoder_lm"}, "model.name=mlp_regressor"),
        (SINUSOID, {"data.source": "python"}, "data.source=sinusoids"),
        (GLYPHS, {"meta.support": "7"}, "meta.support=7 is not a multiple of data.task_ways=5; use 5 or 10"),
        (GLYPHS, {"meta.inner_steps": "3"}, "meta.inner_steps=3 is not read with meta.method=prototypical"),
        (GLYPHS, {"meta.method": "maml", "model.output_dim": "4"}, "use --config.model.output_dim=5"),
        (IN_CONTEXT, {"model.vocab_size": "8"}, "model.vocab_size=1, not 8"),
        ("configs/tiny.py", {"meta.inner_steps": "3"}, "is not read with train.objective=language_modeling"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(recipe, typed, message):
    loaded = loading.load(recipe, "", typed)
    with pytest.raises(ConfigError, match=message) as error:
        validation.validate(loaded.config, 2 if any(key.startswith("mesh.") for key in typed) else 1, loaded)
    assert "\n" not in str(error.value)


def test_a_ramp_that_begins_with_one_large_microbatch_leaves_rows():
    typed = {
        "train.global_batch": "64", "train.gradient_accumulation": "8", "batch.ramp": "steps", "batch.first": "8",
        "plasticity.method": "continual_backprop",
    }  # fmt: skip
    loaded = loading.load(TEXT, "", typed)
    validation.validate(loaded.config, 1, loaded)


@pytest.mark.parametrize("method", ["first_order_maml", "reptile"])
def test_what_is_differentiated_once_may_use_fused_kernels_and_rounded_products(method):
    loaded = loading.load(TEXT, "", {"meta.method": method, "model.quantization": "int8"})
    assert loaded.config.model.attention == "auto"
    validation.validate(loaded.config, 1, loaded)


@pytest.mark.parametrize("recipe", [TEXT, SINUSOID, GLYPHS, IN_CONTEXT])
def test_the_recipes_are_valid(recipe):
    loaded = loading.load(recipe, "", {})
    validation.validate(loaded.config, 1, loaded)
