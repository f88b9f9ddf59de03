# SPDX-License-Identifier: Apache-2.0
"""Rotary positions against complex numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.rotary import rotary_angles, rotate
from tests.layers import references
from tests.support import assert_close

B, T, N, H = 3, 11, 5, 14


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_equals_multiplication_by_unit_complex_numbers(dtype):
    rng = np.random.default_rng(0)
    x, positions = jnp.asarray(rng.standard_normal((B, T, N, H)), dtype), rng.integers(0, 64, (B, T))
    actual = rotate(x, rotary_angles(positions, H, 10_000.0))
    assert actual.dtype == dtype
    assert_close(actual, references.rotary(np.asarray(x, np.float64), positions, 10_000.0), dtype)


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(1)
    q, k = (jnp.float32(rng.standard_normal((1, 1, N, H))) for _ in range(2))

    @jax.jit
    def score(query_position, key_position):
        turned_q = rotate(q, rotary_angles(query_position[None, None], H, 100.0))
        turned_k = rotate(k, rotary_angles(key_position[None, None], H, 100.0))
        return jnp.sum(turned_q * turned_k, axis=-1)

    near, shifted, far, start = (score(*np.array(pair)) for pair in [(29, 17), (12, 0), (29, 18), (0, 0)])
    assert_close(near, shifted)
    assert np.abs(near - far).min() > 1e-3
    assert_close(start, jnp.sum(q * k, axis=-1))
