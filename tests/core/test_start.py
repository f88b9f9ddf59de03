# SPDX-License-Identifier: Apache-2.0
"""The message before the first step about data that is too small for the run."""

import types

import pytest

from core import start
from settings import loading


def corpus(num_tokens: int):
    return types.SimpleNamespace(train=types.SimpleNamespace(num_tokens=num_tokens))


@pytest.mark.parametrize(
    ("keys", "num_tokens", "is_said"),
    [
        ({}, 4_000_000, True), ({"data.path": "mine"}, 4_000_000, False), ({"data.source": "text"}, 4_000_000, False),
        ({}, 400_000_000, False), ({"train.steps": "1000"}, 4_000_000, False),
    ],
)  # fmt: skip
def test_a_large_run_on_the_default_corpus_is_told_what_to_set(keys, num_tokens, is_said):
    config = loading.load("configs/large.py", "v4-8", keys).config
    line = start.repetition(config, corpus(num_tokens))
    assert bool(line) == is_said
    if is_said:
        assert "3,932 M tokens are 983 passes over the 4.0 M tokens" in line and "--config.data.path=FOLDER" in line


def test_batches_of_the_caller_are_not_judged():
    assert start.repetition(loading.load("configs/large.py", "v4-8", {}).config, None) == ""
