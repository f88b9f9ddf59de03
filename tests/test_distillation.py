# SPDX-License-Identifier: Apache-2.0
"""A student of a trained teacher: it learns faster than alone, on any mesh alike, and needs it for training only."""

import functools
import json
import math
import shutil

import jax
import numpy as np
import pytest

import train
from checkpointing import frozen_models
from checkpointing.checkpoints import CheckpointError, Checkpoints
from checkpointing.source_run import SourceRun
from configs.errors import ConfigError
from core import assembly, start
from input_pipeline import sources
from objectives import distillation
from parallelism.mesh import mesh_context
from settings import stored_config
from settings.keys import flat
from settings.validation import validate
from tests.one_step import batch, placed, small_config
from tests.support import assert_close, on_one_device, random_weights, write_sums
from tests.test_train import in_process, lines_of


def learner(**changes):
    config = in_process(
        data__source="synthetic", model__vocab_size=64, model__embed_dim=64, model__mlp_dim=96,
        optimizer__learning_rate=0.01, optimizer__warmup_steps=5, train__steps=40, train__global_batch=16,
        train__eval_every=0, train__save_every=0, evaluation__sample_tokens=0,
    )  # fmt: skip
    for key, value in changes.items():
        section, name = key.split("__")
        config[section][name] = value
    config.mesh.update(fsdp=1, context=len(jax.devices()))
    return config


def student(**changes):
    """Of few steps, with a batch that grows."""
    ramp = dict(batch__ramp="steps", batch__first=8, batch__increase_step=8, batch__increase_factor=2.0)
    return learner(**dict(train__steps=16) | ramp | changes)


@pytest.fixture(scope="module", autouse=True)
def little_is_held_out():
    """Of the source with known entropy: 8,192 tokens, which is enough to tell 0.05 nats."""
    with pytest.MonkeyPatch.context() as patch:
        whole = sources.MarkovWindows
        patch.setattr(sources, "MarkovWindows", lambda words, seed, count, stream: whole(words, seed, 1 << 13, stream))
        yield


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run of one device; its students have eight."""
    folder = tmp_path_factory.mktemp("teacher")
    with on_one_device():
        train.train(learner(train__save_every=20, train__eval_every=16), folder)
    return folder


@pytest.mark.slow
def test_a_student_reaches_a_lower_loss_than_alone_and_its_checkpoint_is_a_model_like_any(teacher, tmp_path):
    """In as many steps as its teacher, the same model from the same weights, was alone, and on smaller batches.

    The source has 1.213 nats a token. As its batch grows, both change to another mesh.
    """
    config = student(
        train__objective="distillation", distillation__teacher=str(teacher), distillation__hidden_weight=0.1,
        layout__changes="8: fsdp=4,context=2",
    )  # fmt: skip
    validate(config, 8)
    train.train(config, tmp_path / "distilled")
    alone, taught = (lines_of(folder, "eval") for folder in (teacher, tmp_path / "distilled"))
    assert 1.2 < alone[40]["eval_loss"] < taught[16]["eval_loss"] < alone[16]["eval_loss"] - 0.05
    lines = lines_of(tmp_path / "distilled", "train")
    assert lines[16]["divergence"] < 0.5 * lines[1]["divergence"]
    assert lines[16]["hidden_distance"] < lines[1]["hidden_distance"]
    stored = stored_config.load_to_read(tmp_path / "distilled", {}).config
    assert stored.train.objective == "language_modeling" and not stored.distillation.teacher
    run = assembly.assemble(stored)
    with Checkpoints(tmp_path / "distilled") as checkpoints, mesh_context(run.mesh):
        params = checkpoints.restore_eval_params(16, run.abstract_state.params)
        assert checkpoints.record(16)["frozen"]["teacher"] == SourceRun("", str(teacher)).checkpoint_ref()
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == run.models.num_parameters


def test_a_run_that_goes_on_has_the_teacher_that_it_began_with(teacher, tmp_path):
    """Though that has been trained further; where it is gone, that is said."""
    name = str(shutil.copytree(teacher, tmp_path / "teacher"))
    longer, before = tmp_path / "teacher" / "checkpoints" / "40", tmp_path / "40"
    longer.rename(before)
    run = assembly.assemble(student(train__objective="distillation", distillation__teacher=name))
    refs = frozen_models.references(run, None)
    frozen = frozen_models.weights(run, refs)
    before.rename(longer)
    same = frozen_models.references(run, {"step": 1, "frozen": refs})
    assert refs["teacher"]["step"] == 20 and refs == same
    jax.tree.map(np.testing.assert_array_equal, frozen, frozen_models.weights(run, same))
    assert frozen_models.references(run, {"step": 1})["teacher"]["step"] == 40  # of a record without references
    shutil.rmtree(longer.with_name("20"))
    with pytest.raises(CheckpointError, match=r"checkpoint 20 of distillation.teacher=.* restore the checkpoint that"):
        frozen_models.references(run, {"step": 1, "frozen": refs})


def taught(folder, **mesh):
    """A run of a student whose teacher, of other sizes, has left its configuration."""
    config = small_config()
    config.model.update(num_layers=1, embed_dim=56, num_heads=4, logit_soft_cap=9.0)
    (folder / "config.json").write_text(json.dumps(flat(config)))
    config = small_config(**mesh)
    config.train.objective = "distillation"
    config.distillation.update(teacher=str(folder), hidden_weight=0.3, divergence="reverse")
    config.optimizer.update(name="sgd", clip_norm=0.0)  # the simplest one
    return config


def gradients_and_scalars(config):
    run = assembly.assemble(config, devices=jax.devices()[: math.prod(config.mesh.values())])
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), run.abstract_state)
    state = state.__class__(**(vars(state) | {"params": random_weights(state.params)}))
    frozen = random_weights(run.abstract_frozen, seed=1)
    inputs = [(state, run.abstract_state), (batch(), run.abstract_batch), (frozen, run.abstract_frozen)]
    with mesh_context(run.mesh):
        after, scalars, gradients = run.train_step_with_grads(*[placed(*pair) for pair in inputs])
    assert jax.tree.structure(after) == jax.tree.structure(state)  # nothing of the teacher is kept
    return jax.device_get((gradients, scalars))


@pytest.fixture(scope="module")
def of_one_device(tmp_path_factory):
    return gradients_and_scalars(taught(tmp_path_factory.mktemp("teacher")))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 2, "model": 2}, {"data": 2, "context": 2}], ids=lambda mesh: "-".join(mesh))
def test_microbatches_on_a_mesh_have_the_gradients_of_the_whole_batch(mesh, tmp_path, of_one_device):
    config = taught(tmp_path, **mesh)
    config.train.gradient_accumulation = 2
    assert_close(gradients_and_scalars(config), of_one_device)


def test_a_teacher_lies_as_any_model_in_the_type_that_it_computes_in(tmp_path):
    config = taught(tmp_path, fsdp=8)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stored | {"model.dtype": "bfloat16"}))
    leaves = jax.tree.leaves(assembly.assemble(config).abstract_frozen)
    products = {leaf.dtype.name for leaf in leaves if leaf.ndim > 2}
    assert products == {"bfloat16"} and {leaf.dtype.name for leaf in leaves} == {"bfloat16", "float32"}  # of norms
    sizes = [(leaf.size, math.prod(leaf.sharding.shard_shape(leaf.shape))) for leaf in leaves]
    assert sum(whole for whole, _ in sizes) > 7 * sum(part for _, part in sizes)


def test_words_tokenizers_and_lengths_that_do_not_go_together_are_refused_in_a_line(teacher, tmp_path):
    def refused(message, act):
        with pytest.raises(ConfigError, match=message) as error:
            act()
        assert "\n" not in str(error.value)

    def of(**changes):
        keys = dict(train__objective="distillation", distillation__teacher=str(teacher))
        return student(**keys | changes)

    refused("model.vocab_size=65 differs from the 64 of", lambda: assembly.assemble(of(model__vocab_size=65)))
    refused("holds no run", lambda: assembly.assemble(of(distillation__teacher=str(tmp_path))))
    longer = of(train__sequence_length=64, model__max_length=64)
    refused("train.sequence_length=64 is longer than the 32", lambda: assembly.assemble(longer))
    recipe = of(distillation__teacher="configs/tiny.py", model__vocab_size=4096)
    refused("a recipe and has no weights", lambda: train.train(recipe, tmp_path / "run"))
    shutil.copy(teacher / "config.json", tmp_path)
    untrained = of(distillation__teacher=str(tmp_path))
    refused("has no checkpoint; train it first", lambda: train.train(untrained, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    refused("needs distillation.teacher", lambda: validate(of(distillation__teacher=""), 8))
    write_sums(tmp_path / "texts", 20)
    stored = json.loads((teacher / "config.json").read_text()) | {"data.tokenizer": "sentencepiece"}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    (tmp_path / "tokenizer.model").write_bytes(b"another")
    bytes_alone = of(
        data__source="text", data__path=f"{tmp_path}/texts/*.txt", data__cache_dir=str(tmp_path / "cache"),
        model__vocab_size=300, distillation__teacher=str(tmp_path),
    )  # fmt: skip
    corpus = train.prepare_corpus(bytes_alone, True)
    check = functools.partial(start.check_tokenizers, distillation.make(bytes_alone), bytes_alone, corpus)
    refused("has another tokenizer than data.tokenizer=byte", check)
    (tmp_path / "tokenizer.model").unlink()
    refused("has no tokenizer for texts", check)
