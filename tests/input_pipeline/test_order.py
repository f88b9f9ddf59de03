# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from input_pipeline.order import example_windows, permute

KEYS = st.integers(0, 2**64 - 1)


@given(size=st.integers(1, 3000), key=KEYS)
def test_the_order_is_a_bijection(size, key):
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@given(size=st.integers(1, 2**62), key=KEYS, data=st.data())
def test_a_single_index_is_an_int_in_range_and_the_same_as_in_an_array(size, key, data):
    index = data.draw(st.integers(0, size - 1))
    place = permute(index, size, key)
    assert isinstance(place, int) and 0 <= place < size
    assert permute(np.array([index, 0]), size, key)[0] == place


@pytest.mark.parametrize("size", [1000, 1024, 1025, 12_000])
def test_keys_give_different_orders_that_look_random(size):
    one, two = permute(np.arange(size), size, 1), permute(np.arange(size), size, 2)
    fixed = [np.mean(one == two), np.mean(one == np.arange(size))]
    neighbours = np.corrcoef(one[:-1], one[1:])[0, 1]
    assert max(fixed) < 5 / size**0.5 and abs(neighbours) < 5 / size**0.5


def test_every_place_is_about_equally_likely():
    index, keys = np.tile(np.arange(7), 7000), np.repeat(np.arange(7000, dtype=np.uint64), 7)
    counts = np.zeros((7, 7))
    np.add.at(counts, (index, permute(index, 7, keys)), 1)
    assert np.abs(counts / 1000 - 1).max() < 0.15


def test_each_pass_shows_every_window_once_in_an_order_of_its_own():
    passes = example_windows(np.arange(300), 100, seed=5).reshape(3, 100)
    assert np.array_equal(np.sort(passes, axis=1), np.tile(np.arange(100), (3, 1)))
    assert not np.array_equal(passes[0], passes[1]) and not np.array_equal(passes[1], passes[2])
    assert not np.array_equal(passes[0], example_windows(np.arange(100), 100, seed=6))
    assert np.array_equal(example_windows(np.arange(250, 300), 100, seed=5), passes.ravel()[250:])


def test_no_epoch_of_a_run_has_the_order_of_an_epoch_with_the_next_seed():
    """Else runs that differ by their seeds alone would see the same rows, an epoch apart."""
    orders = [example_windows(np.arange(300), 100, seed).reshape(3, 100) for seed in (5, 6)]
    assert len(np.unique(np.concatenate(orders), axis=0)) == 6


def test_a_negative_seed_is_a_seed():
    assert not np.array_equal(example_windows(np.arange(50), 50, -1), example_windows(np.arange(50), 50, 1))
