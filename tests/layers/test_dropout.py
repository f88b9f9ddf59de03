# SPDX-License-Identifier: Apache-2.0
"""Dropout: how much is zeroed, that the mean stays, and where nothing happens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.dropout import dropout

SIZE = 40_000


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_a_part_is_zeroed_and_the_rest_scaled_so_that_the_mean_stays(rate):
    x = jnp.arange(1.0, SIZE + 1)
    y = np.asarray(dropout(x, rate, jax.random.key(0), 0))
    dropped = y == 0
    deviation = (rate * (1 - rate) / SIZE) ** 0.5
    assert abs(dropped.mean() - rate) < 4 * deviation
    np.testing.assert_allclose(y[~dropped], np.asarray(x)[~dropped] / (1 - rate), rtol=1e-6)
    assert abs(y.mean() / x.mean() - 1) < 6 * deviation / (1 - rate)


def test_in_bfloat16_the_mean_stays_too():
    """The probability to survive is not rounded to it, which would be 0.17 % off."""
    x = jnp.linspace(1, 2, SIZE, dtype=jnp.bfloat16)
    y = dropout(x, 0.1, jax.random.key(0), 0)
    ratios = np.asarray(y, np.float32)[np.asarray(y) != 0] / np.asarray(x, np.float32)[np.asarray(y) != 0]
    assert abs(ratios.mean() * 0.9 - 1) < 3e-4


def test_what_is_dropped_depends_on_key_and_place_alone():
    def draw(seed: int, place: int):
        return np.asarray(dropout(jnp.ones(SIZE), 0.3, jax.random.key(seed), place))

    first = draw(0, 0)
    np.testing.assert_array_equal(first, draw(0, 0))
    for other in (draw(1, 0), draw(0, 1)):
        agreeing = np.mean(first == other)
        assert abs(agreeing - (0.3**2 + 0.7**2)) < 0.01  # as of independent draws; 0.01 is four standard deviations


def test_without_a_key_nothing_happens_and_the_type_stays():
    x = jnp.ones((3, 5), jnp.bfloat16)
    assert dropout(x, 0.5, None, 0) is x
    assert dropout(x, 0.5, jax.random.key(0), 0).dtype == jnp.bfloat16


def test_the_gradient_passes_where_the_number_passed():
    x = jnp.ones(SIZE)
    gradient = jax.grad(lambda x: dropout(x, 0.25, jax.random.key(3), 0).sum())(x)
    np.testing.assert_array_equal(gradient, dropout(x, 0.25, jax.random.key(3), 0))
