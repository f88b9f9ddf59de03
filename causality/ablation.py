# SPDX-License-Identifier: Apache-2.0
"""What a decoder loses without an activation: zeros, a mean, or another prompt's activation replace it.

Letters as in causality/sites.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from causality.patching import Tables, at_all_sites
from causality.sites import difference, sources_of

KINDS = ("zero", "mean", "resample")


def ablate(
    graph: nnx.GraphDef, params: dict, tokens_PT: np.ndarray, of_prompts_PK: np.ndarray, kind: str, *,
    key: jax.Array | None = None,
) -> Tables:  # fmt: skip
    """Return what each activation adds to logit(answer) - logit(other): the mean of the prompts with it, minus without.

    Args:
      tokens_PT: int32, prompts of the same length, whose positions correspond.
      of_prompts_PK: int32 [P, 2], answer and other token of each prompt.
      kind: what takes the place of the activation: zeros, the mean of the prompts at the same position, or that of
        another prompt, drawn with `key` (arXiv:2309.16042, section 2).

    Raises:
      ValueError: the kind is unknown, a mean or another prompt is asked of one prompt, or a draw without a key.
    """
    if kind not in KINDS:
        raise ValueError(f"ablate: kind={kind!r} is unknown; the kinds are {', '.join(KINDS)}")
    if kind != "zero" and len(tokens_PT) < 2:
        raise ValueError(f"ablate: kind={kind!r} needs at least two prompts; give more, or use kind='zero'")
    if kind == "resample" and key is None:
        raise ValueError("ablate: kind='resample' draws other prompts at random; give key=jax.random.key(0)")
    tokens_PT, of_prompts_PK = np.asarray(tokens_PT, np.int32), np.asarray(of_prompts_PK, np.int32)
    sources = sources_of(graph, params, tokens_PT)
    if kind == "zero":
        sources = jax.tree.map(jnp.zeros_like, sources)
    elif kind == "mean":
        sources = jax.tree.map(lambda x: jnp.broadcast_to(x.mean(1, keepdims=True), x.shape), sources)
    else:
        sources = jax.tree.map(lambda x: x[:, _others(key, len(tokens_PT))], sources)
    intact, ablated = at_all_sites(graph, params, tokens_PT, sources, difference, of_prompts_PK)
    return {name: intact - table for name, table in ablated.items()}


def _others(key: jax.Array, count: int) -> jax.Array:
    """Return a number of another prompt for each of `count` prompts: the next one in a random circle."""
    order = jax.random.permutation(key, count)
    return jnp.zeros(count, jnp.int32).at[order].set(jnp.roll(order, 1))
