# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods of token sequences: single forward passes in batches of few shapes, on any mesh.

Rows are sorted by length and padded to a bucket, a power of two times `shortest_bucket`. The head is applied only to
the positions whose next token is scored: to the last `shortest_bucket` ones or to all of the bucket. So a model is
compiled for at most two shapes in each bucket, 2 * (1 + log2(max_length / 32)) in all on one device.

Letters: B rows, T tokens of a bucket, C scored positions, D embed, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from configs.base import BATCH_AXES
from configs.errors import ConfigError
from input_pipeline.tokenization import AnyTokenizer
from layers.attention.attention import soft_cap
from layers.cross_entropy import chunks, merged
from layers.products import einsum_f32
from parallelism import axis_rules
from parallelism.placement import local_rows, place

SHORTEST = 32  # tokens of the shortest bucket, and positions that go through the head at once
MOST_ROWS = 64  # of a batch of short sequences


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
    """A language model to score; use it with its mesh in context.

    Attributes:
      graph, params: the model, with the interface of models/decoder_lm.py.
      prefix: tokens before each text that the model was trained on; () for none.
      max_length: the longest input, in tokens.
      tokens_per_batch: about how many tokens go through the model at once, over all devices.
      on_batch: called before each batch with (what is computed, batches done, their number). It may raise an exception
        to stop.
    """

    graph: nnx.GraphDef
    params: dict
    mesh: jax.sharding.Mesh
    tokenizer: AnyTokenizer
    prefix: tuple[int, ...]
    max_length: int
    tokens_per_batch: int
    on_batch: Callable[[str, int, int], None] = lambda what, done, total: None

    @property
    def start(self) -> int:
        """The token before a text that nothing else precedes."""
        return self.prefix[-1] if self.prefix else self.tokenizer.end_of_document

    @property
    def batch_shards(self) -> int:
        """The number of parts into which the mesh splits the rows of a batch."""
        return math.prod(self.mesh.shape[axis] for axis in BATCH_AXES)

    @property
    def shortest_bucket(self) -> int:
        """The number of tokens of the shortest bucket, which the mesh axes that split the length divide."""
        return math.lcm(SHORTEST, self.mesh.shape["context"] * self.mesh.shape["model"])

    def bucket(self, length: int) -> int:
        """Return the length of the bucket of `length` tokens."""
        bucket = self.shortest_bucket
        while bucket < length:
            bucket *= 2
        return bucket

    def rows(self, bucket: int) -> int:
        """Return the number of rows of a batch of a bucket, which the batch axes of the mesh divide."""
        shards = self.batch_shards
        return shards * max(1, min(self.tokens_per_batch // bucket, MOST_ROWS) // shards)


class Row(NamedTuple):
    """A sequence to score: the log-likelihood of `continuation` given `context`, token ids, at least one of each."""

    context: Sequence[int]
    continuation: Sequence[int]


class Likelihood(NamedTuple):
    """The log-likelihood of a row's continuation in nats, and whether greedy decoding gives this continuation."""

    value: float
    is_greedy: bool


def log_likelihoods(model: LanguageModel, rows: Sequence[Row]) -> list[Likelihood]:
    """Return the likelihood of each row, the same in all processes; each process must get all rows.

    A row that exceeds `max_length` loses the first tokens of its context. Sums over tokens are float64.

    Raises:
      ConfigError: a continuation is longer than `max_length`.
    """
    fitted = [_fitted(model, row) for row in rows]
    batches = list(_batches(model, fitted))
    sharding, found = axis_rules.batch_sharding(model.mesh), [None] * len(rows)
    for done, (numbers, bucket, scored) in enumerate(batches):
        model.on_batch("log-likelihoods", done, len(batches))
        size = model.rows(bucket)
        own = local_rows(sharding, size)
        arrays = _arrays([fitted[number] for number in numbers], size, bucket, scored)
        batch = next(place([{name: array[own] for name, array in arrays.items()}], sharding, size))
        values_BC, greedy_BC = map(np.asarray, _token_likelihoods(model.graph, model.params, batch))
        for place_in_batch, number in enumerate(numbers):
            count = len(fitted[number].continuation)
            value = values_BC[place_in_batch, :count].astype(np.float64).sum()
            found[number] = Likelihood(float(value), bool(greedy_BC[place_in_batch, :count].all()))
    return found


def _fitted(model: LanguageModel, row: Row) -> Row:
    """Return the row with as much of its context as fits; the last token is not an input."""
    room = model.max_length + 1 - len(row.continuation)
    if room < 1:
        raise ConfigError(
            f"a continuation of {len(row.continuation)} tokens exceeds model.max_length={model.max_length}; shorten it"
        )
    return Row(row.context[-room:], row.continuation)


def _batches(model: LanguageModel, rows: Sequence[Row]) -> Iterator[tuple[list[int], int, int]]:
    """Yield (numbers of rows, bucket, scored positions) of each batch; the longest ones come first."""
    shortest, groups = model.shortest_bucket, {}
    for number, row in enumerate(rows):
        bucket = model.bucket(len(row.context) + len(row.continuation) - 1)
        scored = shortest if len(row.continuation) <= shortest else bucket
        groups.setdefault((bucket, scored), []).append(number)
    for (bucket, scored), numbers in sorted(groups.items(), reverse=True):
        size = model.rows(bucket)
        for start in range(0, len(numbers), size):
            yield numbers[start : start + size], bucket, scored


def _arrays(rows: Sequence[Row], size: int, bucket: int, scored: int) -> dict[str, np.ndarray]:
    """Return the batch of some rows, int32: inputs [B, T], and places and targets [B, C] of scored tokens.

    Other targets are -1.
    """
    shapes = dict.fromkeys(("tokens", "segments", "positions"), bucket) | dict.fromkeys(("places", "targets"), scored)
    batch = {name: np.zeros((size, length), np.int32) for name, length in shapes.items()}
    batch["targets"][:] = -1
    for number, (context, continuation) in enumerate(rows):
        inputs = [*context, *continuation[:-1]]
        end, count = len(inputs), len(continuation)
        batch["tokens"][number, :end] = inputs
        batch["segments"][number, :end] = 1
        batch["positions"][number, :end] = np.arange(end)
        batch["places"][number, :count] = np.arange(end - count, end)
        batch["targets"][number, :count] = continuation
    return batch


@functools.partial(jax.jit, static_argnums=0)
def _token_likelihoods(graph: nnx.GraphDef, params: dict, batch: dict) -> tuple[jax.Array, jax.Array]:
    """Return float32 log p(target) in nats and bool whether it is the likeliest token, [B, C], replicated."""
    model = nnx.merge(graph, params)
    stream_BTD, _ = model(batch["tokens"], batch["positions"], batch["segments"])
    scored_BCD = jnp.take_along_axis(stream_BTD, batch["places"][..., None], axis=1)
    x_BCD, head_DV = model.head_inputs(scored_BCD)

    def of_chunk(_, chunk):
        x_BTD, targets_BT = chunk
        logits_BTV = soft_cap(einsum_f32("BTD,DV->BTV", x_BTD, head_DV.astype(x_BTD.dtype)), model.logit_cap)
        target_BT = jnp.take_along_axis(logits_BTV, jnp.maximum(targets_BT, 0)[..., None], axis=-1)[..., 0]
        likeliest_BT = jnp.argmax(logits_BTV, axis=-1)
        return None, (target_BT - jax.nn.logsumexp(logits_BTV, axis=-1), likeliest_BT == targets_BT)

    num_chunks = x_BCD.shape[1] // SHORTEST
    _, parts = jax.lax.scan(of_chunk, None, chunks(num_chunks, x_BCD, batch["targets"]))
    return tuple(jax.lax.with_sharding_constraint(merged(part), PartitionSpec()) for part in parts)
