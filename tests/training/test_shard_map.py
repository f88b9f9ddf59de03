# SPDX-License-Identifier: Apache-2.0
"""The gradient that each device computes for its own part is that of one device, on every mesh that it serves.

tests/parallelism compares eight devices and every preset; here are sixteen, and what else a run may have.
"""

import json
import math
import os
import re

import jax
import numpy as np
import pytest

from configs.errors import ConfigError
from core import assembly
from parallelism.mesh import mesh_context
from settings.validation import validate
from tests import warm
from tests.one_step import batch, gradients_and_scalars, initial_state, placed, simply_updated, small_config
from tests.support import TOLERANCE, assert_close, relative_error


def program(run) -> str:
    with mesh_context(run.mesh):
        return str(jax.make_jaxpr(run.train_step)(run.abstract_state, run.abstract_batch))


@pytest.mark.slow
def test_sixteen_devices_compute_the_loss_and_every_gradient_of_one():
    """Of slices whose heads are split four ways; benchmarks/layouts.py has a whole step on fsdp=16."""
    cases = [{"remat": "attention", "mesh": {"dcn_data": 2, "fsdp": 2, "model": 4}}]
    code = "from tests import on_sixteen; on_sixteen.main()"
    process = warm.start(["-c", code, json.dumps(cases)], dict(os.environ))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    errors = json.loads(out.splitlines()[-1])
    assert len(errors) == len(cases) and max(errors) <= TOLERANCE["float32"], errors


@pytest.mark.parametrize(
    ("mesh", "full_bytes"),
    [({"fsdp": 4}, 0), ({"data": 2, "fsdp": 2, "model": 2}, 2**30)], ids=["scattered after each", "summed once"],
)  # fmt: skip
def test_microbatches_add_up_to_the_whole_batch(monkeypatch, mesh, full_bytes):
    monkeypatch.setattr(assembly, "FULL_GRADIENT_BYTES", full_bytes)
    actual = gradients_and_scalars.__wrapped__(num_microbatches=2, **mesh)
    assert_close(actual, gradients_and_scalars())


def in_bfloat16(num_microbatches: int, **mesh):
    """Return a run of a model that cannot hold a whole gradient, with a row for each device and microbatch."""
    config = small_config(**mesh)
    config.model.update(dtype="bfloat16", num_layers=1)
    rows = math.prod(mesh.values()) * num_microbatches
    config.train.update(gradient_accumulation=num_microbatches, global_batch=rows)
    simply_updated(config)
    return assembly.assemble(config, devices=jax.devices()[: math.prod(mesh.values())])


def test_microbatches_add_up_in_float32(monkeypatch):
    """Of equal rows the mean is the gradient of one; a sum of 512 in bfloat16 would be 0.7 of it."""
    monkeypatch.setattr(assembly, "FULL_GRADIENT_BYTES", 0)

    def gradient(num_microbatches: int):
        run = in_bfloat16(num_microbatches, fsdp=2)
        rows = jax.tree.map(lambda x: np.repeat(x[:1], run.config.train.global_batch, 0), batch())
        with mesh_context(run.mesh):
            return run.train_step_with_grads(initial_state(run), placed(rows, run.abstract_batch))[2]

    one, mean_of_many = jax.device_get((gradient(1), gradient(512)))
    errors = jax.tree.map(relative_error, mean_of_many, one)
    assert max(jax.tree.leaves(errors)) < 0.02, errors  # 0.006 by the rounding of each reduced gradient


def test_copies_can_be_summed_in_float32():
    config = in_bfloat16(1, dcn_data=2, data=2, fsdp=2).config
    for dtype, expected in ("auto", {"bf16", "f32"}), ("float32", {"f32"}):
        config.train.sum_dtype = dtype
        found = re.findall(r"(\w+)\[[^\n]*\] = psum", program(assembly.assemble(config)))
        assert set(found) == expected


def test_other_models_have_the_same_gradients():
    model = {"tie_embeddings": True, "mup_base_dim": 20, "biases": "all", "qk_norm": True, "remat": "mlp"}
    model, mesh = tuple(model.items()), {"data": 2, "fsdp": 2, "model": 2}
    assert_close(gradients_and_scalars(of_model=model, **mesh), gradients_and_scalars(of_model=model))


@pytest.mark.slow
def test_float32_sums_bring_bfloat16_gradients_nearer_to_those_of_copies():
    """Which compute the same parts and sum them in float32."""

    def gradient(**how):
        leaves = jax.tree.leaves(gradients_and_scalars(of_model=(("dtype", "bfloat16"),), **how)[0])
        return np.concatenate([leaf.ravel() for leaf in leaves])

    rounded, exact = gradient(fsdp=8), gradient(fsdp=8, sum_dtype="float32")
    copies = gradient(data=8, sum_dtype="float32")
    assert relative_error(exact, copies) < 0.7 * relative_error(rounded, copies)


def test_in_float32_the_type_of_sums_changes_nothing():
    config = small_config(fsdp=4, model=2)
    simply_updated(config)
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
    ("mesh", "supports_shard_map"),
    [
        ({}, False),
        ({"fsdp": 8}, True),
        ({"dcn_data": 2, "data": 4}, True),
        ({"fsdp": 4, "model": 2}, True),
        ({"fsdp": 4, "context": 2}, False),
        ({"data": 4, "expert": 2}, True),
    ],
    ids=str,
)
def test_meshes_that_do_not_split_the_context_are_computed_by_device(mesh, supports_shard_map):
    config = small_config(**mesh)
    simply_updated(config)
    run = assembly.assemble(config, devices=jax.devices()[: 8 if mesh else 1])
    assert ("shard_map" in program(run)) == supports_shard_map


def test_a_length_that_heads_do_not_split_is_left_to_the_compiler():
    config = small_config(fsdp=4, model=2)
    simply_updated(config)
    config.train.sequence_length -= 1
    assert "shard_map" not in program(assembly.assemble(config))


def test_devices_draw_different_dropout():
    """With one key for all, two devices that hold the same rows would drop the same."""
    config = small_config(fsdp=2)
    config.model.dropout = 0.5
    simply_updated(config)
    run = assembly.assemble(config, devices=jax.devices()[:2])
    rows = jax.tree.map(lambda x: np.concatenate([x[:8], x[:8]]), batch())
    state = initial_state(run)
    with mesh_context(run.mesh):
        _, together, _ = run.train_step_with_grads(state, placed(rows, run.abstract_batch))
        half = jax.tree.map(lambda x: np.where(np.arange(16)[:, None] < 8, x, 0), rows)
        _, alone, _ = run.train_step_with_grads(state, placed(half, run.abstract_batch))
    assert abs(float(together["loss"]) - float(alone["loss"])) > 1e-4
