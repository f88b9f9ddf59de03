# SPDX-License-Identifier: Apache-2.0
"""Held-out sequences computed a part at a time: the loss of the whole, in the memory of a part."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from configs.errors import ConfigError
from core import assembly
from objectives.language_modeling import LanguageModeling
from parallelism.mesh import mesh_context
from settings.validation import validate
from tests.models.test_decoder_lm import VARIANTS
from tests.one_step import batch, placed, small_config
from tests.support import assert_close, make_model, model_config, packed_batch, random_weights

LENGTH, PART = 24, 6
# The tolerance is that of any float32 result, 1e-5: the same sums over keys, and some come in another order.
MODELS = {
    "everything": VARIANTS["together"] | {"dropout": 0.0},  # windows, global layers, grouped queries, yarn, caps, ...
    "window longer than a part": {"sliding_window": 9},
    "local angles": VARIANTS["gemma"],
    "experts": {"num_experts": 4, "shared_experts": 1, "num_layers": 2},
}


def losses(model: dict, scan: bool, documents: dict, part: int):
    """Return (sum of losses, weight) of each row alone, so that no error of a row is hidden by others."""
    graph, params = make_model(model_config(**model), scan=scan)
    objective = LanguageModeling(0, 0, num_chunks=4, heldout_parts=LENGTH // part)

    @jax.jit
    def evaluate(row):
        return objective.evaluate(nnx.merge(graph, params), row)

    rows = [{name: array[n : n + 1] for name, array in documents.items()} for n in range(len(documents["tokens"]))]
    return [evaluate(row) for row in rows]


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_of_parts_is_that_of_the_whole(name):
    """Of documents that end within a part and at its border, go over several, and leave padding behind."""
    documents = packed_batch([[24], [4, 2, 15], [6, 6, 9, 3], [1, 20], []], LENGTH, 37)
    whole, parts = (losses(MODELS[name], name != "experts", documents, part) for part in (LENGTH, PART))
    assert_close(parts, whole)
    assert whole[0]["loss"][1] == 24 and parts[-1]["loss"] == (0.0, 0.0)


def test_rows_of_another_length_have_fewer_parts_and_the_same_loss(monkeypatch):
    """A caller's held-out rows may be longer or shorter than those of training."""
    documents = packed_batch([[5, 10]], 15, 37)
    graph, params = make_model(model_config())
    model, lengths = nnx.merge(graph, params), []
    heldout = LanguageModeling._heldout

    def watched(objective, model, part, *others):
        lengths.append(part["tokens"].shape[1])
        return heldout(objective, model, part, *others)

    monkeypatch.setattr(LanguageModeling, "_heldout", watched)
    objectives = [LanguageModeling(0, 0, 4, heldout_parts=parts) for parts in (1, 4)]
    found = [jax.jit(functools.partial(objective.evaluate, model))(documents) for objective in objectives]
    assert_close(*found)
    assert set(lengths) == {15, 5}


def test_a_part_alone_would_have_another_loss():
    """What an earlier system did: each part a sequence of its own, without what stands before it."""
    documents = packed_batch([[24]], LENGTH, 37)
    cut = {name: array.reshape(-1, PART) for name, array in documents.items()}
    cut["positions"] = cut["positions"] % PART
    alone = sum(loss["loss"][0] for loss in losses({}, True, cut, LENGTH))
    whole = losses({}, True, documents, LENGTH)[0]["loss"][0]
    assert abs(alone / whole - 1) > 0.01


@functools.cache
def heldout_step(chunk_tokens: int, length=LENGTH, rows=16, num_experts=0, capacity=0.0, **mesh):
    """Return (run, its compiled evaluation step)."""
    config = small_config(**mesh)
    config.model.num_experts, config.model.expert_capacity = num_experts, capacity
    config.model.max_length = config.train.sequence_length = length
    config.train.global_batch, config.train.loss_chunk_tokens = rows, 16
    config.evaluation.chunk_tokens = chunk_tokens
    config.model.attention = "reference"  # which holds all scores of what it is given
    run = assembly.assemble(config, devices=jax.devices()[: int(np.prod(config.mesh.values()))])
    with mesh_context(run.mesh):
        return run, run.eval_step.lower(run.abstract_state.params, run.abstract_batch).compile()


@pytest.mark.parametrize(
    ("mesh", "num_experts"),
    [({"context": 2, "model": 2}, 0), ({"fsdp": 2, "expert": 2, "capacity": 0.5}, 4)],
    ids=str,
)
def test_on_a_mesh_it_is_the_loss_of_one_device(mesh, num_experts):
    """With experts, those of a capacity too: an evaluation drops no token."""
    found, how = [], {"num_experts": num_experts}
    for run, step in (heldout_step(0, **how), heldout_step(PART, **how, **mesh)):
        params = random_weights(run.abstract_state.params)
        inputs = placed((params, batch()), (run.abstract_state.params, run.abstract_batch))
        with mesh_context(run.mesh):
            found.append(jax.device_get(step(*inputs)))
    assert_close(*found)


def test_memory_falls_with_the_part():
    """XLA counts the memory that the compiled evaluation step needs in addition to its arguments."""
    whole, parts = (heldout_step(n, 2048, 1)[1].memory_analysis().temp_size_in_bytes for n in (0, 128))
    assert whole > 16 * parts  # in proportion to the number of scores


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation.chunk_tokens": 7}, "does not divide train.sequence_length=24; use 6"),
        ({"evaluation.chunk_tokens": 48}, "does not divide train.sequence_length=24; use 24"),
        ({"evaluation.chunk_tokens": -1}, "must be 0 or greater"),
        ({"evaluation.chunk_tokens": 3, "mesh.context": 2}, "is not a multiple of mesh.context=2; use 6"),
    ],
    ids=str,
)
def test_parts_that_are_none_are_refused_in_a_line(changes, message):
    config = small_config()
    for key, value in changes.items():
        section, name = key.split(".")
        config[section][name] = value
    with pytest.raises(ConfigError, match=r"^evaluation.chunk_tokens=") as error:
        validate(config, config.mesh.context)
    assert message in str(error.value) and "\n" not in str(error.value)
