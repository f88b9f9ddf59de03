# SPDX-License-Identifier: Apache-2.0
"""The figure that a trained model is compared with is one that an untrained model does not beat."""

import math
from collections import Counter

import numpy as np
import pytest

from input_pipeline.shards import TokenWindows
from input_pipeline.unigram import unigram_bits_per_byte

BYTES = 300


def stored(*shards: list[int]) -> TokenWindows:
    return TokenWindows([np.array(shard, np.uint16) for shard in shards], np.array([0]), BYTES, end_of_document=0)


def test_it_is_the_cross_entropy_of_frequencies_in_training():
    train, heldout = ([1] * 50 + [2] * 30, [3] * 15), [1] * 40 + [2] * 20 + [7]
    seen, size = Counter(train[0] + train[1]), 8
    bits = -sum(math.log2((seen[token] + 1) / (95 + size)) for token in heldout)
    assert unigram_bits_per_byte([stored(*train)], stored(heldout), size) == pytest.approx(bits / BYTES)
    parts = [stored(train[0]), stored(train[1])]  # of a mixture
    assert unigram_bits_per_byte(parts, stored(heldout), size) == pytest.approx(bits / BYTES)


def test_a_uniform_distribution_does_not_beat_it_where_held_out_text_is_unlike_the_training_text():
    uniform = math.log2(8) * 100 / BYTES
    assert unigram_bits_per_byte([stored([1] * 1000)], stored([2] * 100), 8) == uniform


def test_of_long_splits_a_part_of_each_shard_is_counted(monkeypatch):
    monkeypatch.setattr("input_pipeline.unigram.MOST_TOKENS", 100)
    train = stored([1, 2] * 500, [3, 4] * 500)
    assert train.token_counts(100, 8).tolist() == [0, 25, 25, 25, 25, 0, 0, 0]
    heldout = stored([1, 2, 3, 4] * 250)
    assert unigram_bits_per_byte([train], heldout, 8) == pytest.approx(math.log2(108 / 26) * 1000 / BYTES)


def test_a_model_that_has_learned_nothing_is_not_below_it_on_a_small_corpus(corpus):
    ready = corpus(tokenizer="sentencepiece", vocab_size=5000)  # a tokenizer that has learned most of the text by heart
    heldout, size = ready.heldout, ready.tokenizer.vocab_size
    untrained = math.log2(size) * heldout.num_tokens / heldout.num_bytes
    assert 0 < ready.unigram_bits_per_byte <= untrained
