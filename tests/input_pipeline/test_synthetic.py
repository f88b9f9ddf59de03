# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from input_pipeline.errors import DataError
from input_pipeline.synthetic import MarkovWindows


def test_a_window_is_a_function_of_seed_stream_and_index():
    windows = MarkovWindows(101, 3, 10_000, "train")
    batch, again = windows.read(np.array([5, 0, 5]), 64), MarkovWindows(101, 3, 10_000, "train").read(np.array([5]), 64)
    for key, values in batch.items():
        assert values.dtype == np.int32 and values.shape == (3, 64)
        assert np.array_equal(values[0], values[2]) and np.array_equal(values[:1], again[key])
    assert np.array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    for other in (MarkovWindows(101, 4, 10_000, "train"), MarkovWindows(101, 3, 10_000, "heldout")):
        assert not np.array_equal(other.read(np.array([5]), 64)["tokens"], again["tokens"])
    assert windows.num_examples(64) == 157


def test_the_entropy_is_the_stated_one():
    vocab_size = 23
    batch = MarkovWindows(vocab_size, 0, 1 << 20, "train").read(np.arange(2000), 128)
    pairs = np.zeros((vocab_size, vocab_size))
    np.add.at(pairs, (batch["tokens"].ravel(), batch["targets"].ravel()), 1)
    frequency = pairs.sum(1) / pairs.sum()
    probability = pairs / pairs.sum(1, keepdims=True)
    entropy = -np.sum(frequency[:, None] * probability * np.log(np.where(pairs > 0, probability, 1)))
    assert ((pairs > 0).sum(1) == 4).all()
    assert np.abs(frequency * vocab_size - 1).max() < 0.05
    assert entropy == pytest.approx(1.75 * np.log(2), rel=0.005)


def test_held_out_windows_come_from_the_same_chain():
    pairs = [
        {*zip(batch["tokens"].ravel().tolist(), batch["targets"].ravel().tolist(), strict=True)}
        for batch in (MarkovWindows(11, 7, 1 << 20, name).read(np.arange(200), 50) for name in ("train", "heldout"))
    ]
    assert pairs[0] == pairs[1]


def test_too_small_a_vocabulary_is_an_error():
    with pytest.raises(DataError, match=r"model.vocab_size=3 is too small for data.source=synthetic; use 4 or more"):
        MarkovWindows(3, 0, 100, "train")
