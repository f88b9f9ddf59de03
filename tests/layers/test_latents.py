# SPDX-License-Identifier: Apache-2.0
"""Random latents have the spread that they say, differ by row, and do not depend on other rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import latents
from layers.latents import Path

ROWS = 3


def keys(rows: int = ROWS):
    return jax.random.key_data(jax.random.split(jax.random.key(7), rows))


def test_a_path_without_noise_and_at_full_rate_is_the_update_itself():
    before, after = jnp.ones((ROWS, 2)), jnp.full((ROWS, 2), 5.0)
    assert Path().follow(before, after) == (after, Path())
    assert not jax.tree.leaves(Path()), "it adds nothing to a loop, so that the program is the same"


def test_a_path_moves_part_of_the_way_and_adds_noise_of_its_deviation():
    before, after = jnp.full((ROWS, 4000), 2.0), jnp.full((ROWS, 4000), 4.0)
    moved, path = Path(keys(), 0.5, 0.25).follow(before, after)
    assert moved.mean(axis=1) == pytest.approx(np.full(ROWS, 2.5), abs=0.04)  # 5 deviations of a mean of 4000
    assert moved.std(axis=1) == pytest.approx(np.full(ROWS, 0.5), rel=0.06)
    again, _ = path.follow(before, after)
    assert not np.allclose(again, moved), "each move has its own noise"
    of_first, _ = Path(keys()[:1], 0.5, 0.25).follow(before[:1], after[:1])
    np.testing.assert_array_equal(of_first, moved[:1])


def test_random_states_have_their_deviation_and_are_truncated():
    like = jnp.zeros((ROWS, 40, 100)), (jnp.zeros((ROWS, 40, 100)),)
    high, (low,) = latents.random_states(keys(), like, 3.0)
    for drawn in (high, low):
        assert drawn.std() == pytest.approx(3.0, rel=0.05)
        assert np.abs(drawn).max() <= 3.0 * 2.2738
    assert not np.allclose(high, low) and not np.allclose(high[0], high[1])


def test_keys_of_each_do_not_depend_on_their_number():
    few, many = latents.of_each(keys(), 2).reshape(ROWS, 2, 2), latents.of_each(keys(), 5).reshape(ROWS, 5, 2)
    np.testing.assert_array_equal(few, many[:, :2])
    assert len({row.tobytes() for row in np.asarray(many).reshape(-1, 2)}) == ROWS * 5
    assert not (latents.folded(keys(), 1) == latents.folded(keys(), 2)).all()
