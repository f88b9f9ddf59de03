# SPDX-License-Identifier: Apache-2.0
"""SwiGLU against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers.mlp import SwiGLU
from tests.layers import references
from tests.support import assert_close

B, T, D, F = 3, 11, 20, 28


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_swiglu_equals_the_formula(dtype):
    layer = SwiGLU(embed_dim=D, mlp_dim=F, out_scale=1.0, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((B, T, D)), dtype)
    weights = [np.asarray(w[...].astype(dtype), np.float64) for w in (layer.gate, layer.up, layer.down)]
    actual = layer(x)
    assert actual.dtype == dtype
    assert_close(actual, references.swiglu(np.asarray(x, np.float64), *weights), dtype)
