# SPDX-License-Identifier: Apache-2.0
"""Rotary positions against complex numbers, their scaling against what was published."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.attention import rotary
from layers.attention.rotary import rotary_angles, rotary_frequencies, rotate
from tests.layers import references
from tests.support import assert_close

B, T, N, H = 3, 11, 5, 14


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_equals_multiplication_by_unit_complex_numbers(dtype):
    rng = np.random.default_rng(0)
    x, positions = jnp.asarray(rng.standard_normal((B, T, N, H)), dtype), rng.integers(0, 64, (B, T))
    frequencies = references.rotary_frequencies(H, 10_000.0)[0]
    actual = rotate(x, rotary_angles(positions, jnp.float32(frequencies), 1.3))
    assert actual.dtype == dtype
    assert_close(actual, references.rotary(np.asarray(x, np.float64), positions, frequencies, 1.3), dtype)


SCALINGS = {  # those of models that were published
    "Llama 2": (128, 10_000.0),
    "LongChat": (128, 10_000.0, "linear", 8.0),
    "Llama 3.1": (128, 500_000.0, "llama3", 8.0, 8192),
    "Llama 3.2": (64, 500_000.0, "llama3", 32.0, 8192),
    "YaRN Llama 2 128k": (128, 10_000.0, "yarn", 32.0, 4096),
    "Qwen 2.5": (128, 1_000_000.0, "yarn", 4.0, 32768),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_scaled_as_published(name):
    frequencies, magnitude = rotary_frequencies(*SCALINGS[name])
    expected, expected_magnitude = references.rotary_frequencies(*SCALINGS[name])
    np.testing.assert_allclose(frequencies, expected, rtol=1e-5)
    assert abs(magnitude - expected_magnitude) < 1e-12


@pytest.mark.parametrize("name", ["Llama 3.1", "Llama 3.2", "YaRN Llama 2 128k", "Qwen 2.5"])
def test_fast_pairs_stay_slow_ones_are_divided_and_some_lie_between(name):
    head_dim, theta, _, factor, length = SCALINGS[name]
    plain, scaled = rotary_frequencies(head_dim, theta)[0], rotary_frequencies(*SCALINGS[name])[0]
    ratio, turns = np.asarray(plain / scaled), np.asarray(length * plain / (2 * np.pi))
    np.testing.assert_allclose(ratio[turns > 40], 1, rtol=1e-5)
    np.testing.assert_allclose(ratio[turns < 0.7], factor, rtol=1e-5)
    assert ((ratio > 1.01) & (ratio < 0.99 * factor)).sum() >= 3 and (np.diff(ratio) >= -1e-5).all()


def test_yarn_scales_scores_by_the_square_of_its_magnitude():
    """A token with itself, which no rotation changes: 1.2772588722^2 of what it was, for a factor of 16."""
    q = jnp.float32(np.random.default_rng(0).standard_normal((1, 1, N, H)))
    turned = rotate(q, rotary_angles(jnp.array([[17]]), *rotary_frequencies(H, 100.0, "yarn", 16.0, 64)))
    assert_close(jnp.sum(turned**2, axis=-1), 1.2772588722**2 * jnp.sum(q**2, axis=-1))


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(1)
    q, k = (jnp.float32(rng.standard_normal((1, 1, N, H))) for _ in range(2))

    @jax.jit
    def score(query_position, key_position):
        frequencies, _ = rotary_frequencies(H, 100.0)
        turned_q = rotate(q, rotary_angles(query_position[None, None], frequencies))
        turned_k = rotate(k, rotary_angles(key_position[None, None], frequencies))
        return jnp.sum(turned_q * turned_k, axis=-1)

    near, shifted, far, start = (score(*np.array(pair)) for pair in [(29, 17), (12, 0), (29, 18), (0, 0)])
    assert_close(near, shifted)
    assert np.abs(near - far).min() > 1e-3
    assert_close(start, jnp.sum(q * k, axis=-1))


def test_rotating_by_a_product_is_the_same(monkeypatch):
    """As on a TPU."""
    x = np.random.default_rng(0).standard_normal((2, 7, 3, 8), np.float32)
    angles = rotary_angles(np.arange(14).reshape(2, 7), *rotary_frequencies(8, 100.0))
    expected = rotate(x, angles)
    monkeypatch.setattr(rotary, "platform", lambda: "tpu")
    assert_close(rotate(x, angles), expected)
