# SPDX-License-Identifier: Apache-2.0
"""Revise drafts: what a model drew is examined as a whole, and tokens that are probably wrong are replaced.

The model has a module of layers/error_corrector.py.
"""

import functools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from inference.decoding import LARGEST_BATCH, LENGTH_MULTIPLE
from inference.engine import NO_TOKEN, pad_rows
from layers.error_corrector import fill_gaps

CHUNK_TOKENS = 16  # of a row, whose logits exist at once; divides LENGTH_MULTIPLE


class Judgement(NamedTuple):
    """What the module says of each token of a draft.

    Attributes:
      wrong_BT: float32, the probability that it is wrong.
      best_BT: int32, the likeliest other token.
      confidence_BT: float32, in that token, see `ErrorCorrector.revisions`.
    """

    wrong_BT: jax.Array
    best_BT: jax.Array
    confidence_BT: jax.Array


def revise(
    graph: nnx.GraphDef, params: dict, prompts: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]], *,
    threshold: float, vocab_size: int, ends: Collection[int],
) -> list[list[int]]:  # fmt: skip
    """Return the drafts with each token replaced in whose replacement the module's confidence reaches the threshold.

    Lengths do not change, except that a draft may have the token that ended it, without which it is returned: the
    module has learned that an end follows the last word. The first token of a draft is kept, since it may complete the
    last token of the prompt. All tokens are judged in the draft as it was drawn.

    Args:
      graph, params: the model; needs a mesh in context.
      prompts: token ids before each draft, at least one.
      vocab_size, ends: ids from `vocab_size` on and ends are never written.
    """
    revised, pairs = [], list(zip(prompts, drafts, strict=True))
    for first in range(0, len(pairs), LARGEST_BATCH):
        part = pairs[first : first + LARGEST_BATCH]
        judged = jax.device_get(judge(graph, params, *_batch(part), vocab_size, tuple(sorted(ends))))
        for row, (prompt, draft) in enumerate(part):
            start = len(prompt) - 1  # of the draft among the targets
            best, confidence = (of_row[row, start:] for of_row in (judged.best_BT, judged.confidence_BT))
            new = [
                int(other) if place and sure >= threshold else token
                for place, (token, other, sure) in enumerate(zip(draft, best, confidence, strict=False))
                if token not in ends
            ]
            revised.append(new)
    return revised


def _batch(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[np.ndarray, ...]:
    """Return (tokens, targets, positions, segments) [B, T] of prompts with their drafts, one document a row."""
    rows = [[*prompt, *draft] for prompt, draft in pairs]
    length = -(-max(map(len, rows)) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    ids = pad_rows(rows, length + 1)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (len(rows), length))
    return np.maximum(ids[:, :-1], 0), ids[:, 1:], positions, (ids[:, :-1] != NO_TOKEN).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(0, 6, 7))
def judge(
    graph: nnx.GraphDef, params: dict, tokens_BT: jax.Array, draft_BT: jax.Array, positions_BT: jax.Array,
    segments_BT: jax.Array, vocab_size: int, ends: tuple[int, ...] = (),
) -> Judgement:  # fmt: skip
    """Judge each token of a draft. T is a multiple of CHUNK_TOKENS, or less than it.

    Args:
      tokens_BT: int, what the model reads.
      draft_BT: int, the token of the draft after each; less than 0: there is none to judge.
      vocab_size, ends: as in `revise`.
    """
    model = nnx.merge(graph, params)
    how = dict(num_chunks=max(1, tokens_BT.shape[1] // CHUNK_TOKENS), logit_cap=model.logit_cap)
    stream_BTD, _ = model(tokens_BT, positions_BT, segments_BT)
    stream_BTD, head_DV = model.head_inputs(stream_BTD)
    embedded_BTD = model.embed(fill_gaps(draft_BT, tokens_BT), model.dtype)
    found = model.corrector(stream_BTD, head_DV, embedded_BTD, draft_BT, positions_BT, segments_BT, **how)
    ids_V = jnp.arange(head_DV.shape[1])
    allowed_V = (ids_V < vocab_size) & ~jnp.isin(ids_V, jnp.array(ends, jnp.int32))
    best_BT, confidence_BT = model.corrector.revisions(found, head_DV, draft_BT, allowed_V=allowed_V, **how)
    return Judgement(jax.nn.sigmoid(found.wrong_BT), best_BT, confidence_BT)
