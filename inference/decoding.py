# SPDX-License-Identifier: Apache-2.0
"""Samples from a trained model with the engine: one prefill, then one token at a time.

Letters: B prompts, T tokens of a prompt, V vocabulary.
"""

import functools
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from inference.engine import Cache, Engine, pad_rows

COLDEST = 1e-30  # a smaller divisor overflows float32 logits; the likeliest token is certain long before


def choose(
    logits_BV: jax.Array, key: jax.Array, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> jax.Array:
    """Draw one token a row; int32 [B].

    Args:
      logits_BV: float32.
      key: random key.
      temperature: 0, or less than COLDEST, takes the likeliest.
      top_k: only the k likeliest; 0: all.
      top_p: only the likeliest whose probabilities sum to at least p, the first always (arXiv:1904.09751).
    """
    if temperature < COLDEST:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / temperature
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    if top_k:
        logits_BV = jnp.where(logits_BV < sorted_BV[:, min(top_k, sorted_BV.shape[1]) - 1, None], -jnp.inf, logits_BV)
    if top_p < 1:
        probabilities_BV = jax.nn.softmax(sorted_BV, axis=-1)
        before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV
        last_kept_B = jnp.maximum(jnp.sum(before_BV < top_p, axis=-1), 1) - 1
        threshold_B = jnp.take_along_axis(sorted_BV, last_kept_B[:, None], axis=-1)
        logits_BV = jnp.where(logits_BV < threshold_B, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("temperature", "top_k", "top_p"))
def _draw(engine: Engine, cache: Cache | None, tokens_BT, allowed_BV, key, **sampling) -> tuple[jax.Array, Cache]:
    """Start or extend rows; return (the next token of each row, one of the allowed, and the cache)."""
    if cache is None:
        logits_BV, cache = engine.prefill(tokens_BT)
    else:
        logits_BTV, cache = engine.extend(cache, tokens_BT)
        logits_BV = logits_BTV[:, -1]
    return choose(jnp.where(allowed_BV, logits_BV, -jnp.inf), key, **sampling), cache


def generate(
    graph: nnx.GraphDef, params: dict, prompts: list[list[int]], *, max_tokens: int, ends: Collection[int],
    vocab_size: int, first_BV: np.ndarray | None = None, seed: int = 0, temperature: float = 1.0, top_k: int = 0,
    top_p: float = 1.0,
) -> list[list[int]]:  # fmt: skip
    """Continue each prompt by up to `max_tokens` tokens; stop at one of the `ends`, which is not returned.

    Args:
      graph, params: the model; needs a mesh in context.
      prompts: token ids, at least one each.
      vocab_size: ids from here on are never drawn.
      first_BV: bool [B, vocab_size], what the first token of each row may be; default: any.
      temperature, top_k, top_p: see `choose`.
    """
    engine = Engine(graph, params, max(map(len, prompts)) + max_tokens)
    head_DV = jax.eval_shape(nnx.merge(graph, params).head_weight)
    any_BV = np.arange(head_DV.shape[1])[None] < vocab_size
    allowed_BV = any_BV if first_BV is None else np.pad(first_BV, ((0, 0), (0, any_BV.shape[1] - vocab_size)))
    key, outputs, running = jax.random.key(seed), [[] for _ in prompts], [True] * len(prompts)
    cache, tokens_BT = None, pad_rows(prompts)
    for index in range(max_tokens):
        next_B, cache = _draw(
            engine, cache, tokens_BT, allowed_BV, jax.random.fold_in(key, index), temperature=temperature, top_k=top_k,
            top_p=top_p,
        )  # fmt: skip
        drawn = np.asarray(next_B)
        for row, token in enumerate(drawn.tolist()):
            running[row] = running[row] and token not in ends
            if running[row]:
                outputs[row].append(token)
        if not any(running):
            break
        tokens_BT, allowed_BV = drawn[:, None], any_BV
    return outputs
