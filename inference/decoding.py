# SPDX-License-Identifier: Apache-2.0
"""Samples from a trained model: a batch of prompts to the end, see inference/batching.py."""

import dataclasses
from collections.abc import Collection, Iterator

import numpy as np
from flax import nnx

from inference.batching import Batch, Request
from inference.choice import Sampling
from inference.engine import Engine

LARGEST_BATCH = 32  # rows of the cache; more prompts wait
LENGTH_MULTIPLE = 128  # tokens of a row, so that prompts of other lengths use the same programs


def generate(
    graph: nnx.GraphDef, params: dict, prompts: list[list[int]], *, max_tokens: int, ends: Collection[int],
    vocab_size: int, first_BV: np.ndarray | None = None, seed: int = 0, **sampling,
) -> list[list[int]]:  # fmt: skip
    """Continue each prompt by up to `max_tokens` tokens; stop at one of the `ends`, which is not returned.

    Args:
      graph, params: the model; needs a mesh in context.
      prompts: token ids, at least one each.
      vocab_size: ids from here on are never drawn.
      first_BV: bool [B, vocab_size], what the first token of each row may be; default: any.
      seed: of the first prompt's draws; the next prompt has the next seed.
      sampling: see `Sampling` in inference/choice.py.
    """
    how = Sampling(**sampling)
    requests = [
        Request(
            prompt, max_tokens, dataclasses.replace(how, seed=seed + index), ends,
            None if first_BV is None else first_BV[index],
        )
        for index, prompt in enumerate(prompts)
    ]  # fmt: skip
    batch = _batch(graph, params, max(map(len, prompts)) + max_tokens, min(len(prompts), LARGEST_BATCH), vocab_size)
    return [one.tokens for one in batch.run(requests)]


def stream(
    graph: nnx.GraphDef, params: dict, prompt: list[int], *, max_tokens: int, ends: Collection[int], vocab_size: int,
    first_V: np.ndarray | None = None, **sampling,
) -> Iterator[int]:  # fmt: skip
    """Yield the tokens that `generate` returns for one prompt, each as soon as it is drawn; see there."""
    batch = _batch(graph, params, len(prompt) + max_tokens, 1, vocab_size)
    one = batch.add(Request(prompt, max_tokens, Sampling(**sampling), ends, first_V))
    num_seen = 0
    while not one.reason:
        batch.step()
        yield from one.tokens[num_seen:]
        num_seen = len(one.tokens)


def _batch(graph: nnx.GraphDef, params: dict, length: int, num_rows: int, vocab_size: int) -> Batch:
    """Return an empty batch whose rows have at least this length."""
    engine = Engine(graph, params, -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)
    return Batch(engine, num_rows=num_rows, vocab_size=vocab_size)
