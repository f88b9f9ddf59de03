# SPDX-License-Identifier: Apache-2.0
"""Methods of plasticity replace the units that they should, on any mesh, and leave everything else as it was."""

import functools
import math

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from core import assembly
from parallelism.mesh import mesh_context
from tests.one_step import batch, initial_state, placed, small_config

MLP = ("stack", "blocks", "mlp")
EXPERTS = (("num_experts", 8), ("experts_per_token", 2), ("shared_experts", 1), ("mlp_dim", 28))
CAPACITY = (*EXPERTS, ("expert_capacity", 8.0))


@functools.cache
def after(steps: int, method: str, of_model: tuple = (), num_microbatches: int = 1, **mesh):
    """Return (state, scalars) after steps on one batch, with a method that acts in each step."""
    config = small_config(**mesh)
    config.model.update(dict(of_model))
    config.train.update(gradient_accumulation=num_microbatches)
    config.optimizer.update(schedule="constant", learning_rate=1e-3)
    config.plasticity.update(method=method, rate=0.05, maturity=0, every=1, measure=5, decay=0.5, dormant_below=0.5)
    run = assembly.assemble(config, devices=jax.devices()[: math.prod(mesh.values())])
    state, rows = initial_state(run), placed(batch(), run.abstract_batch)
    with mesh_context(run.mesh):
        for _ in range(steps):
            state, scalars = run.train_step(state, rows)
    return jax.device_get((state, scalars))


@pytest.mark.parametrize(
    ("method", "of_model", "num_microbatches", "mesh"),
    [
        ("continual_backprop", (), 2, {"data": 2, "fsdp": 2, "model": 2}),
        ("redraw", (), 1, {"fsdp": 4, "context": 2}),
        ("redo", EXPERTS, 1, {"fsdp": 2, "expert": 2, "model": 2}),
        ("continual_backprop", CAPACITY, 2, {"data": 2, "expert": 4}),
        ("shrink_perturb", (), 1, {"data": 2, "fsdp": 2, "model": 2}),
    ],
)
def test_a_method_does_the_same_on_every_mesh(method, of_model, num_microbatches, mesh):
    """Each device has its own tokens and units, and adds up the measures of its microbatches."""
    expected, scalars = after(2, method, of_model)
    found, others = after(2, method, of_model, num_microbatches, **mesh)
    if method != "shrink_perturb":
        assert scalars["units_replaced"] == others["units_replaced"] > 0
    for name in ("dormant_share", "weight_norm"):
        np.testing.assert_allclose(others[name], scalars[name], rtol=1e-4)
    paths = flatten_dict(expected.extra)
    assert any(path[0] == "plasticity_measures" for path in paths)
    for path, leaf in (flatten_dict(expected.params) | paths).items():
        other = (flatten_dict(found.params) | flatten_dict(found.extra))[path]
        if path[0] not in ("guard", "average"):
            scale = np.abs(leaf).max() + 1e-6
            np.testing.assert_allclose(other / scale, leaf / scale, atol=3e-3, err_msg=str(path))
