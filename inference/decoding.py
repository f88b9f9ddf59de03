# SPDX-License-Identifier: Apache-2.0
"""Samples from a trained model: a batch of prompts to the end, see inference/batching.py."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from flax import nnx

from inference.batching import Batch, Request
from inference.choice import Sampling
from inference.engine import Engine

LARGEST_BATCH = 32  # rows of the cache; more prompts wait
LENGTH_MULTIPLE = 128  # tokens of a row, so that prompts of other lengths use the same programs


def generate(
    graph: nnx.GraphDef, params: dict, prompts: list[list[int]], *, max_tokens: int, ends: Collection[int],
    vocab_size: int, first_BV: np.ndarray | None = None, redrawn: Sequence[int | None] = (), seed: int = 0,
    cache_dtype: str = "model", **sampling,
) -> list[list[int]]:  # fmt: skip
    """Continue each prompt by up to `max_tokens` tokens; stop at one of the `ends`, which is not returned.

    Args:
      graph, params: the model; needs a mesh in context.
      prompts: token ids, at least one each.
      vocab_size: ids from here on are never drawn.
      first_BV: bool [B, vocab_size], what the first token of each row may be; default: any.
      redrawn: for each prompt as in `Request`; default: none.
      cache_dtype: see `Engine`.
      seed: of the first prompt's draws; the next prompt has the next seed.
      sampling: see `Sampling` in inference/choice.py.
    """
    how = Sampling(**sampling)
    requests = [
        Request(
            prompt, max_tokens, dataclasses.replace(how, seed=seed + index), ends,
            None if first_BV is None else first_BV[index], redrawn=redrawn[index] if redrawn else None,
        )
        for index, prompt in enumerate(prompts)
    ]  # fmt: skip
    num_rows, length = min(len(prompts), LARGEST_BATCH), max(request.most for request in requests)
    batch = _batch(graph, params, length, num_rows, vocab_size, cache_dtype)
    return [one.tokens for one in batch.run(requests)]


def stream(
    graph: nnx.GraphDef, params: dict, prompt: list[int], *, max_tokens: int, ends: Collection[int], vocab_size: int,
    first_V: np.ndarray | None = None, redrawn: int | None = None, cache_dtype: str = "model", **sampling,
) -> Iterator[int]:  # fmt: skip
    """Yield the tokens that `generate` returns for one prompt, each as soon as it is drawn; see there."""
    request = Request(prompt, max_tokens, Sampling(**sampling), ends, first_V, redrawn=redrawn)
    batch = _batch(graph, params, request.most, 1, vocab_size, cache_dtype)
    one = batch.add(request)
    num_seen = 0
    while not one.reason:
        batch.step()
        yield from one.tokens[num_seen:]
        num_seen = len(one.tokens)


def _batch(graph: nnx.GraphDef, params: dict, length: int, num_rows: int, vocab_size: int, cache_dtype: str) -> Batch:
    """Return an empty batch whose rows have at least this length."""
    engine = Engine(graph, params, -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, cache_dtype)
    return Batch(engine, num_rows=num_rows, vocab_size=vocab_size)
