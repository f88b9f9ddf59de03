# SPDX-License-Identifier: Apache-2.0
"""RMSNorm against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from layers.normalization import RMSNorm, normalized
from tests.layers import references
from tests.support import assert_close

B, T, D = 3, 11, 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norm_equals_the_formula(dtype):
    rng = np.random.default_rng(0)
    layer = RMSNorm(D, epsilon=0.1)
    layer.scale[...] = jnp.float32(scale := rng.standard_normal(D))
    x = jnp.asarray(rng.standard_normal((B, T, D)), dtype)
    actual = layer(x)
    assert actual.dtype == dtype
    assert_close(actual, references.rms_norm(np.asarray(x, np.float64), scale, 0.1), dtype)


def test_a_scale_from_one_is_one_and_the_parameter():
    plain, layer = RMSNorm(D, epsilon=0.1), RMSNorm(D, epsilon=0.1, from_one=True)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((B, T, D)))
    np.testing.assert_array_equal(layer(x), plain(x))  # at the start
    layer.scale[...] += 0.5
    assert_close(layer(x), 1.5 * plain(x))


def test_mean_square_of_bfloat16_is_taken_in_float32():
    """In bfloat16 a sum of 4,096 ones stops growing at 256, and squares are rounded."""
    assert_close(RMSNorm(4096, epsilon=0.0)(jnp.ones((B, 4096), jnp.bfloat16)), np.ones((B, 4096)), "bfloat16")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((B, T, D)), jnp.bfloat16)
    actual = normalized(x, 0.1)
    assert actual.dtype == jnp.float32
    assert_close(actual, references.rms_norm(np.asarray(x, np.float64), np.ones(D), 0.1), "float32")
