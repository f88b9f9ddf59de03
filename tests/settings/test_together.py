# SPDX-License-Identifier: Apache-2.0
"""Keys that do not go together, or are typed and have no effect, are refused; such keys of a recipe are not."""

import pytest

from configs import base
from configs.errors import ConfigError
from input_pipeline import sources
from settings import loading, together, validation
from settings.keys import flat


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({"train.balance_loss": "0.01"}, "train.balance_loss=0.01 is not read with model.num_experts=0; "),
        ({"distillation.temperature": "7"}, "distillation.temperature=7.0 is not read with distillation.teacher=''; "),
        ({"batch.memory_gib": "3"}, "batch.memory_gib=3.0 is not read with batch.fit=none; "),
        ({"batch.learning_rate": "sqrt"}, "batch.learning_rate=sqrt is not read with batch.ramp=none; "),
        (
            {"model.num_experts": "4", "model.experts_per_token": "1", "model.gate_scale": "2.5"},
            "model.gate_scale=2.5 is not read with model.experts_per_token=1; ",
        ),
        (
            {"optimizer.name": "sgd", "optimizer.beta2": "0.9"},
            "optimizer.beta2=0.9 is not read with optimizer.name=sgd; leave it out, or set optimizer.name",
        ),
        (
            {"optimizer.cooldown_fraction": "0.3"},
            "optimizer.cooldown_fraction=0.3 is not read with optimizer.schedule=cosine; ",
        ),
        (
            {"data.validation_path": "held", "data.holdout_fraction": "0.3"},
            "data.holdout_fraction=0.3 is not read with data.validation_path=held; leave it out, or empty data.valid",
        ),
        ({"data.puzzle_size": "4"}, "data.puzzle_size=4 is not read with data.source=auto; "),
        ({"data.source": "arc", "data.puzzle_count": "3"}, "data.puzzle_count=3 is not read with data.source=arc; "),
        ({"data.source": "maze", "data.puzzle_clues": "6"}, "data.puzzle_clues=6 is not read with data.source=maze; "),
        ({"grpo.clip": "0.3"}, "grpo.clip=0.3 is not read with train.objective=language_modeling; "),
    ],
    ids=str,
)
def test_a_typed_key_that_nothing_reads_is_told(typed, message):
    loaded = loading.load("configs/tiny.py", "", typed)
    with pytest.raises(ConfigError) as error:
        validation.validate(loaded.config, 1, loaded)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_what_the_recipe_says_or_what_is_the_default_may_stand():
    """A recipe with shared experts, made dense; switches that are typed with what they are anyway."""
    typed = {"model.num_experts": "0", "train.balance_loss": "0", "batch.increase_factor": "1.2"}
    loaded = loading.load("configs/moe_small.py", "", typed)
    assert loaded.config.model.shared_experts
    validation.validate(loaded.config, 1, loaded)


def test_the_tables_know_the_keys_that_there_are():
    values = flat(base.get_config())
    for keys, owner, _ in together.READ_WITH:
        assert {owner, *keys} <= values.keys()
    assert {key for need in together.NEEDS for key in (need[0], need[2])} <= values.keys()
    assert set(together.SOURCES) <= sources.SOURCES.keys()
    for folder, names in {"models": together.MODELS, "objectives": together.OBJECTIVES}.items():
        assert {*names} <= {file.stem for file in (loading.ROOT / folder).glob("*.py")}


@pytest.mark.parametrize(
    ("recipe", "typed"),
    [
        ("configs/trm/sudoku_mini.py", {"model.head_dim": "32"}),
        ("configs/trm/sudoku_mini.py", {"inference.noise": "0.5"}),  # for generate.py --trajectories=16
        ("configs/trm/arc1.py", {"data.puzzle_size": "20", "data.path": "FOLDER"}),  # as a group of a study types it
    ],
)
def test_what_is_read_here_or_by_another_command_can_be_typed(recipe, typed):
    together.check_typed(loading.load(recipe, "", typed))


@pytest.mark.parametrize(
    ("typed", "key", "ours"),
    [
        (
            {"train.init_from": "FOLDER", "train.objective": "meta_learning", "data.source": "sinusoids"},
            "model.name",
            "mlp_regressor",
        ),
        ({"train.objective": "classification"}, "model.name", "decoder_lm"),
        ({"model.convolution": "3"}, "model.name", "decoder_lm"),
        ({"train.objective": "dpo", "train.init_from": "FOLDER"}, "data.source", "text"),
        ({"grpo.clip": "0.3"}, "train.objective", "language_modeling"),
        ({"data.subset": "en"}, "data.source", "text"),
    ],
)
def test_no_rule_refuses_a_module_that_was_added_to_ours(typed, key, ours):
    loaded = loading.load("configs/tiny.py", "", typed)
    loaded.config.update_from_flattened_dict({key: "added"})
    together.check(flat(loaded.config), of_mesh=False)
    together.check_typed(loaded)
    loaded.config.update_from_flattened_dict({key: ours})
    with pytest.raises(ConfigError, match=f"^{next(iter(typed))}=.* (needs|is not read with) {key}="):
        together.check(flat(loaded.config), of_mesh=False)
        together.check_typed(loaded)
