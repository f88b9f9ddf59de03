# SPDX-License-Identifier: Apache-2.0
"""A decoder with experts is the same model on every mesh, in microbatches, scanned or not."""

import jax
import numpy as np
import pytest

from tests.one_step import gradients_and_scalars
from tests.support import assert_close

MODEL = (("num_experts", 8), ("experts_per_token", 3), ("shared_experts", 1), ("mlp_dim", 24))
MESHES = [{"fsdp": 2, "expert": 4}, {"fsdp": 2, "expert": 2, "model": 2}]


def step(**how):
    gradients, scalars = gradients_and_scalars(**{"of_model": MODEL} | how)
    return gradients, {name: value for name, value in scalars.items() if name != "gradient_norm"}


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(f"{axis}{size}" for axis, size in mesh.items()))
def test_loss_loads_and_every_gradient_are_those_of_one_device(mesh):
    actual = gradients_and_scalars(of_model=MODEL, **mesh)
    assert_close(actual, gradients_and_scalars(of_model=MODEL))
    assert all(np.abs(gradient).max() > 0 for gradient in jax.tree.leaves(actual[0]))
