# SPDX-License-Identifier: Apache-2.0
"""The gradient that each device computes for its own part is that of one device, on every mesh that it serves.

tests/parallelism compares eight devices and every preset; here are sixteen, and what else a run may have.
"""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

import assembly
from configs.base import ConfigError
from configs.validation import validate
from parallelism.mesh import mesh_context
from tests.one_step import batch, gradients_and_scalars, placed, small_config
from tests.support import ROOT, TOLERANCE, assert_close, relative_error


def program(run) -> str:
    with mesh_context(run.mesh):
        return str(jax.make_jaxpr(run.train_step)(run.abstract_state, run.abstract_batch))


def test_sixteen_devices_compute_the_loss_and_every_gradient_of_one():
    cases = [
        {"remat": "attention", "mesh": {"fsdp": 16}},
        {"remat": "none", "mesh": {"data": 2, "fsdp": 8}},
        {"remat": "mlp", "mesh": {"dcn_data": 2, "data": 2, "fsdp": 4}},
        {"remat": "attention", "mesh": {"data": 2, "fsdp": 2, "model": 4}},
    ]
    command = [sys.executable, "-m", "tests.on_sixteen", json.dumps(cases)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    errors = json.loads(ended.stdout.splitlines()[-1])
    assert len(errors) == len(cases) and max(errors) <= TOLERANCE["float32"], errors


@pytest.mark.parametrize("whole_bytes", [0, 2**30], ids=["scattered after each", "summed once"])
@pytest.mark.parametrize("mesh", [{"fsdp": 4}, {"data": 2, "fsdp": 2, "model": 2}], ids=lambda mesh: "-".join(mesh))
def test_microbatches_add_up_to_the_whole_batch(monkeypatch, whole_bytes, mesh):
    monkeypatch.setattr(assembly, "WHOLE_GRADIENT_BYTES", whole_bytes)
    actual = gradients_and_scalars.__wrapped__(num_microbatches=2, **mesh)
    assert_close(actual, gradients_and_scalars())


@pytest.mark.parametrize(
    "model",
    [
        {"tie_embeddings": True, "mup_base_dim": 20},
        {"biases": "all", "qk_norm": True, "remat": "mlp"},
    ],
)
def test_other_models_have_the_same_gradients(model):
    model, mesh = tuple(model.items()), {"data": 2, "fsdp": 2, "model": 2}
    assert_close(gradients_and_scalars(of_model=model, **mesh), gradients_and_scalars(of_model=model))


def test_float32_sums_bring_bfloat16_gradients_nearer_to_those_of_one_device():
    """And to those of copies, which compute the same parts and sum them in float32."""

    def gradient(**how):
        leaves = jax.tree.leaves(gradients_and_scalars(of_model=(("dtype", "bfloat16"),), **how)[0])
        return np.concatenate([leaf.ravel() for leaf in leaves])

    rounded, exact, one, copies = gradient(fsdp=8), gradient(fsdp=8, sum_dtype="float32"), gradient(), gradient(data=8)
    assert relative_error(exact, one) < relative_error(rounded, one)
    assert relative_error(exact, copies) < 0.7 * relative_error(rounded, copies)


def test_in_float32_the_type_of_sums_changes_nothing():
    config = small_config(fsdp=4, model=2)
    default = program(assembly.assemble(config))
    config.train.sum_dtype = "float32"
    assert program(assembly.assemble(config)) == default


@pytest.mark.parametrize(("mesh", "length"), [({"context": 2}, 24), ({"model": 2}, 23)], ids=str)
def test_where_the_compiler_sums_it_cannot_be_told_in_which_type(mesh, length):
    config = small_config(fsdp=4, **mesh)
    config.train.update(sequence_length=length, sum_dtype="float32")
    with pytest.raises(ConfigError, match=r"^train.sum_dtype=float32 needs .*$"):
        validate(config, 8)


@pytest.mark.parametrize(
    ("mesh", "by_device"),
    [
        ({}, False),
        ({"fsdp": 8}, True),
        ({"dcn_data": 2, "data": 4}, True),
        ({"fsdp": 4, "model": 2}, True),
        ({"data": 2, "model": 4}, True),
        ({"fsdp": 4, "context": 2}, False),
        ({"data": 4, "expert": 2}, True),
    ],
    ids=str,
)
def test_meshes_that_do_not_split_the_context_are_computed_by_device(mesh, by_device):
    run = assembly.assemble(small_config(**mesh), devices=jax.devices()[: 8 if mesh else 1])
    assert ("shard_map" in program(run)) == by_device


def test_a_length_that_heads_do_not_split_is_left_to_the_compiler():
    config = small_config(fsdp=4, model=2)
    config.train.sequence_length -= 1
    assert "shard_map" not in program(assembly.assemble(config))


def test_devices_draw_different_dropout():
    """With one key for all, two devices that hold the same rows would drop the same."""
    config = small_config(fsdp=2)
    config.model.dropout = 0.5
    run = assembly.assemble(config, devices=jax.devices()[:2])
    rows = jax.tree.map(lambda x: np.concatenate([x[:8], x[:8]]), batch())
    with mesh_context(run.mesh):
        state = run.init()
        _, together, _ = run.observed_step(state, placed(rows, run.abstract_batch))
        half = jax.tree.map(lambda x: np.where(np.arange(16)[:, None] < 8, x, 0), rows)
        _, alone, _ = run.observed_step(state, placed(half, run.abstract_batch))
    assert abs(float(together["loss"]) - float(alone["loss"])) > 1e-4
