# SPDX-License-Identifier: Apache-2.0
"""SwiGLU against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers.mlp import SwiGLU
from tests.layers import references
from tests.support import assert_close, random_weights

B, T, D, F = 3, 11, 20, 28


def make_layer(biased: bool) -> SwiGLU:
    return SwiGLU(embed_dim=D, mlp_dim=F, biased=biased, quantization="none", out_scale=1.0, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("biased", [False, True])
def test_swiglu_equals_the_formula(dtype, biased):
    layer = make_layer(biased)
    nnx.update(layer, random_weights(nnx.to_pure_dict(nnx.state(layer))))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((B, T, D)), dtype)
    weights = jax.tree.map(lambda w: np.asarray(jnp.asarray(w, dtype), np.float64), nnx.to_pure_dict(nnx.state(layer)))
    actual = layer(x)
    assert actual.dtype == dtype
    assert_close(actual, references.swiglu(np.asarray(x, np.float64), weights), dtype)


def test_biases_start_at_zero_and_only_where_asked_for():
    biased, plain = (nnx.to_pure_dict(nnx.state(make_layer(biased))) for biased in (True, False))
    assert {name: weight.shape for name, weight in biased.items() if name not in plain} == {
        "gate_bias": (F,), "up_bias": (F,), "down_bias": (D,),
    }  # fmt: skip
    assert not any(np.asarray(biased[name]).any() for name in ("gate_bias", "up_bias", "down_bias"))
