# SPDX-License-Identifier: Apache-2.0
"""What the device holds for the rows of a batch, and the programs that use it and write it in place.

- `decode` decodes a token of every row;
- `extend` extends up to a few rows by a part of a prompt, and `draw_first` draws the first tokens after the prompts
  that are complete;
- `copy` begins rows as copies of the first tokens of other rows, or of their own earlier tokens.

Letters: B rows of the cache, R rows of a call, T tokens of a row in it, V vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from inference.choice import Choice, Drawn, draw
from inference.engine import NO_TOKEN, Cache, Engine
from layers.axes import constrain


class Past(NamedTuple):
    """What the draws of all rows depend on: last token, tokens seen, bias of the logits."""

    last_B: jax.Array
    seen_BV: jax.Array
    bias_BV: jax.Array


class Rows(NamedTuple):
    """What the device holds for all rows."""

    cache: Cache
    past: Past


@functools.partial(jax.jit, static_argnames=("num_rows", "head_size"))
def empty(engine: Engine, num_rows: int, head_size: int) -> Rows:
    """Return rows without tokens."""
    shape = num_rows, head_size
    past = Past(jnp.zeros(num_rows, jnp.int32), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.float32))
    return Rows(engine.empty(num_rows), _constrained(past))


@functools.partial(jax.jit, donate_argnames="rows")
def copy(engine: Engine, rows: Rows, row_R, source_R, keep_R, seen_RV, bias_RV) -> Rows:
    """Begin row `row_R` with the first `keep_R` tokens of row `source_R`."""
    copied = engine.shorten(engine.fork(rows.cache, source_R), keep_R)
    seen_BV = rows.past.seen_BV.at[row_R].set(seen_RV, mode="drop")
    bias_BV = rows.past.bias_BV.at[row_R].set(bias_RV, mode="drop")
    return Rows(engine.put(rows.cache, row_R, copied), _constrained(Past(rows.past.last_B, seen_BV, bias_BV)))


@functools.partial(jax.jit, donate_argnames="cache")
def extend(engine: Engine, cache: Cache, row_R, tokens_RT) -> tuple[Cache, jax.Array]:
    """Append a part of a prompt to row `row_R`; return (cache, logits [R, V] of the next token)."""
    within_R = jnp.minimum(row_R, len(cache.num_tokens_B) - 1)
    logits_RV, extended = engine.extend_to_last(engine.fork(cache, within_R), tokens_RT)
    return engine.put(cache, row_R, extended), constrain(logits_RV, "batch", "vocab")


@functools.partial(jax.jit, donate_argnames="past")
def draw_first(past: Past, row_R, logits_RV, first_RV, how: Choice, wants_top) -> tuple[Past, Drawn]:
    """Draw the first token of row `row_R`, of those that `first_RV` allows."""
    within_R = jnp.minimum(row_R, len(past.last_B) - 1)
    drawn, seen_RV = draw(logits_RV, how, past.seen_BV[within_R], past.bias_BV[within_R], wants_top, first_RV)
    last_B = past.last_B.at[row_R].set(drawn.token_B, mode="drop")
    seen_BV = past.seen_BV.at[row_R].set(seen_RV, mode="drop")
    return _constrained(Past(last_B, seen_BV, past.bias_BV)), drawn


@functools.partial(jax.jit, donate_argnames="rows")
def decode(engine: Engine, rows: Rows, is_active_B, how: Choice, wants_top) -> tuple[Rows, Drawn]:
    """Append the last token of each active row, and draw the next."""
    cache, past = rows
    tokens_B1 = jnp.where(is_active_B, past.last_B, NO_TOKEN)[:, None]
    logits_BV, cache = engine.extend_to_last(cache, tokens_B1)
    drawn, seen_BV = draw(logits_BV, how, past.seen_BV, past.bias_BV, wants_top)
    last_B = jnp.where(is_active_B, drawn.token_B, past.last_B)
    past = Past(last_B, jnp.where(is_active_B[:, None], seen_BV, past.seen_BV), past.bias_BV)
    return Rows(cache, _constrained(past)), drawn


def _constrained(past: Past) -> Past:
    """Constrain the shardings, so that each program returns arrays sharded as the others take them."""
    of_vocab = (constrain(leaf, "batch", "vocab") for leaf in (past.seen_BV, past.bias_BV))
    return Past(constrain(past.last_B, "batch"), *of_vocab)
