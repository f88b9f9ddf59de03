# SPDX-License-Identifier: Apache-2.0
"""Samples from a trained model: a batch of prompts to the end, see inference/batching.py."""

from collections.abc import Iterator, Sequence

from flax import nnx

from inference.batching import Batch, Request
from inference.engine import Engine

LARGEST_BATCH = 32  # rows of the cache; more prompts wait
LENGTH_MULTIPLE = 128  # tokens of a row, so that prompts of other lengths use the same programs


def generate(
    graph: nnx.GraphDef, params: dict, requests: Sequence[Request], *, vocab_size: int, cache_dtype: str = "model",
    with_ends: bool = False,
) -> list[list[int]]:  # fmt: skip
    """Return the tokens of each continuation, in the order of the requests.

    Args:
      graph, params: the model; needs a mesh in context.
      vocab_size: ids from here on are never drawn.
      cache_dtype: see `Engine`.
      with_ends: whether a continuation that one of its ends has ended has that token last.
    """
    num_rows, length = min(len(requests), LARGEST_BATCH), max(request.most for request in requests)
    batch = _batch(graph, params, length, num_rows, vocab_size, cache_dtype)
    return [[*one.tokens, *(one.end if with_ends else ())] for one in batch.run(requests)]


def stream(
    graph: nnx.GraphDef, params: dict, request: Request, *, vocab_size: int, cache_dtype: str = "model"
) -> Iterator[int]:
    """Yield the tokens that `generate` returns for one request, each as soon as it is drawn; see there."""
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
