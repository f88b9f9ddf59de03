# SPDX-License-Identifier: Apache-2.0
"""Which token comes next: each row of a batch is drawn in its own way.

Letters: B rows, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from layers.axes import constrain

COLDEST = 1e-30  # a smaller divisor overflows float32 logits; the likeliest token is certain long before
NUM_TOP = 20  # likeliest tokens whose log-probabilities are reported where a request asks for them


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of one continuation are drawn.

    Attributes:
      temperature: divides the logits; 0, or less than COLDEST, takes the likeliest.
      top_k: only the k likeliest; 0: all.
      top_p: only the likeliest whose probabilities sum to at least p, the first always (arXiv:1904.09751).
      min_p: only tokens with at least this share of the likeliest's probability (arXiv:2407.01082).
      repetition_penalty: divides positive logits of tokens that the row has (arXiv:1909.05858, section 4.1), multiplies
        negative ones, as transformers does; 1: none.
      logit_bias: added to logits, by token id.
      reported_temperature: divides the logits in the log-probability of a drawn token that is reported.
      seed: of the draws. They depend on it, on the number of tokens drawn before, and on the probabilities alone.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    reported_temperature: float = 1.0
    seed: int = 0


class Choice(NamedTuple):
    """The scalars of `Sampling`, one entry a row, and the number of tokens that the row has drawn."""

    temperature_B: np.ndarray
    top_k_B: np.ndarray
    top_p_B: np.ndarray
    min_p_B: np.ndarray
    repetition_penalty_B: np.ndarray
    reported_temperature_B: np.ndarray
    seed_B: np.ndarray
    num_drawn_B: np.ndarray


class Drawn(NamedTuple):
    """One token a row, its log-probability, and the likeliest tokens with theirs."""

    token_B: jax.Array
    log_prob_B: jax.Array
    top_log_probs_BK: jax.Array
    top_tokens_BK: jax.Array


def choice_of(rows: Sequence[tuple[Sampling, int]]) -> Choice:
    """Return the arrays for rows of (how it is drawn, number of tokens drawn)."""
    columns = [
        (how.temperature, how.top_k, how.top_p, how.min_p, how.repetition_penalty, how.reported_temperature,
         how.seed % 2**32, count)
        for how, count in rows
    ]  # fmt: skip
    types = (np.float32, np.int32, np.float32, np.float32, np.float32, np.float32, np.uint32, np.int32)
    return Choice(*(np.array(column, dtype) for column, dtype in zip(zip(*columns, strict=True), types, strict=True)))


def adjust(logits_BV: jax.Array, how: Choice, seen_BV: jax.Array, bias_BV: jax.Array) -> jax.Array:
    """Return the logits after the repetition penalty of tokens that were seen, and the bias."""
    penalty_B1 = how.repetition_penalty_B[:, None]
    penalized_BV = jnp.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    return jnp.where(seen_BV, penalized_BV, logits_BV) + bias_BV


def _argmax(logits_BV: jax.Array) -> jax.Array:
    """Return the first place of the maximum of each row, int32 [B]; on a CPU, 3 times as fast as jnp.argmax."""
    V = logits_BV.shape[-1]
    is_largest_BV = logits_BV == jnp.max(logits_BV, axis=-1, keepdims=True)
    return jnp.minimum(jnp.min(jnp.where(is_largest_BV, jnp.arange(V, dtype=jnp.int32), V), axis=-1), V - 1)


def choose(logits_BV: jax.Array, how: Choice) -> jax.Array:
    """Draw one token a row; int32 [B]. Sorting and random numbers are computed only if a row needs them."""
    greedy_B = how.temperature_B < COLDEST
    likeliest_B = _argmax(logits_BV)

    def draw(logits_BV):
        logits_BV = logits_BV / jnp.where(greedy_B, 1.0, how.temperature_B)[:, None]
        truncates = (how.top_k_B > 0) | (how.top_p_B < 1) | (how.min_p_B > 0)
        logits_BV = jax.lax.cond(jnp.any(truncates), lambda x: _truncated(x, how), lambda x: x, logits_BV)
        keys_B = jax.vmap(lambda seed, n: jax.random.fold_in(jax.random.key(seed), n))(how.seed_B, how.num_drawn_B)
        return jnp.where(greedy_B, likeliest_B, jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32))

    return jax.lax.cond(jnp.all(greedy_B), lambda _: likeliest_B, draw, logits_BV)


def _truncated(logits_BV: jax.Array, how: Choice) -> jax.Array:
    """Return logits with -inf for tokens that top_k, top_p or min_p leave out; top_p is of what top_k leaves.

    Of tokens that are equally likely, those with lower ids are kept first.
    """
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    rank_1V = jnp.arange(logits_BV.shape[1])[None]
    top_k_B1 = jnp.where(how.top_k_B > 0, how.top_k_B, logits_BV.shape[1])[:, None]
    probabilities_BV = jax.nn.softmax(jnp.where(rank_1V < top_k_B1, sorted_BV, -jnp.inf), axis=-1)
    before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV
    all_B1 = how.top_p_B[:, None] >= 1  # `before` rounds to 1 before the last token
    kept_BV = (rank_1V < top_k_B1) & ((before_BV < how.top_p_B[:, None]) | (rank_1V == 0) | all_B1)
    kept_BV &= probabilities_BV >= how.min_p_B[:, None] * probabilities_BV[:, :1]
    lowest_B1 = jnp.min(jnp.where(kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    num_lowest_B1 = jnp.sum(kept_BV & (sorted_BV == lowest_B1), axis=-1, keepdims=True)
    is_lowest_BV = logits_BV == lowest_B1
    left_out_BV = (logits_BV < lowest_B1) | (is_lowest_BV & (jnp.cumsum(is_lowest_BV, axis=-1) > num_lowest_B1))
    return jnp.where(left_out_BV, -jnp.inf, logits_BV)


def log_probabilities(logits_BV: jax.Array, tokens_B: jax.Array) -> jax.Array:
    """Return float32 [B]: the log-probability of a token a row by softmax of the logits."""
    chosen_B1 = jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=-1)
    return chosen_B1[:, 0] - jax.nn.logsumexp(logits_BV, axis=-1)


def likeliest(logits_BV: jax.Array, exists_BV: jax.Array, needed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (log-probabilities, ids) of the NUM_TOP likeliest tokens that exist, falling; zeros unless needed."""
    count = min(NUM_TOP, logits_BV.shape[1])

    def top(logits_BV):
        values_BK, tokens_BK = jax.lax.top_k(jnp.where(exists_BV, logits_BV, -jnp.inf), count)
        return values_BK - jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True), tokens_BK

    shape = logits_BV.shape[0], count
    zeros = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)
    return jax.lax.cond(needed, top, lambda _: zeros, logits_BV)


def draw(logits_BV, how: Choice, seen_BV, bias_BV, wants_top, allowed_BV=True) -> tuple[Drawn, jax.Array]:
    """Return what was drawn, replicated, and the tokens that each row has then.

    Args:
      bias_BV: added to the logits; -inf for an id that is not a token, which is never drawn or listed.
      allowed_BV: what may be drawn now; the likeliest tokens are listed whether they may or not.
    """
    token_B = choose(adjust(logits_BV, how, seen_BV, jnp.where(allowed_BV, bias_BV, -jnp.inf)), how)
    reported_BV = logits_BV / how.reported_temperature_B[:, None]
    top = likeliest(logits_BV, bias_BV > -jnp.inf, wants_top)
    drawn = Drawn(token_B, log_probabilities(reported_BV, token_B), *top)
    seen_BV = seen_BV.at[jnp.arange(len(token_B)), token_B].set(True)
    return Drawn(*(constrain(leaf, *[None] * leaf.ndim) for leaf in drawn)), seen_BV
