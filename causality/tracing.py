# SPDX-License-Identifier: Apache-2.0
"""Causal tracing: which activations restore an answer that noise on the embeddings destroyed (arXiv:2202.05262).

Letters as in causality/sites.py; P are draws of the noise.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from causality.patching import NOWHERE, Tables, at_all_sites
from causality.sites import at_each_site, check_tokens, probability, replicated, sources_of

NOISE = 3.0  # standard deviations of the embeddings (arXiv:2202.05262, section 2.1)
DRAWS = 8


class Trace(NamedTuple):
    """The probability of an answer: in the clean run, with noise, and what each restored activation adds to the latter.

    The indirect effect of an activation, P(answer; noise, restored) - P(answer; noise), is a mean of the draws.
    """

    clean: float
    corrupt: float
    effects: Tables


def trace(
    graph: nnx.GraphDef, params: dict, tokens_T: np.ndarray, is_noised_T: np.ndarray, answer: int, *, key: jax.Array
) -> Trace:
    """Return the indirect effect of each activation on the probability of an answer (arXiv:2202.05262, section 2.1).

    Normal noise of NOISE standard deviations of the embeddings is added to chosen tokens, the same in all runs.

    Args:
      tokens_T: int32 [T].
      is_noised_T: bool [T].
      answer: the token whose probability after the prompt is measured.

    Raises:
      ValueError: `is_noised_T` is not a bool for each token, or the vocabulary lacks a token.
    """
    check_tokens(nnx.merge(graph, params), tokens_T, answer)
    is_noised_T = np.asarray(is_noised_T)
    if is_noised_T.dtype != bool or is_noised_T.shape != np.shape(tokens_T):
        raise ValueError(f"is_noised_T is {is_noised_T.dtype} {list(is_noised_T.shape)}; give a bool for each token")
    tokens_PT = np.tile(np.asarray(tokens_T, np.int32), (DRAWS, 1))
    sources, of_prompts_PK = sources_of(graph, params, tokens_PT), np.full((DRAWS, 1), answer, np.int32)
    noise_PTD = _noise(graph, params, key, jnp.asarray(is_noised_T))
    nothing = at_each_site(graph, params, tokens_PT, sources, NOWHERE, probability, of_prompts_PK)
    corrupt, restored = at_all_sites(graph, params, tokens_PT, sources, probability, of_prompts_PK, noise_PTD)
    effects = {name: table - corrupt for name, table in restored.items()}
    return Trace(float(np.asarray(nothing)[0, 0]), float(corrupt), effects)


@functools.partial(jax.jit, static_argnames="graph")
def _noise(graph: nnx.GraphDef, params: dict, key: jax.Array, is_noised_T: jax.Array) -> jax.Array:
    """Return noise [P, T, D] on the embedded tokens, in the units of the tap "embed"."""
    embed = nnx.merge(graph, params).embed
    deviation = embed.scale * jnp.std(embed.embedding[...])
    drawn_PTD = jax.random.normal(key, (DRAWS, len(is_noised_T), embed.embedding.shape[1]))
    return replicated(NOISE * deviation * drawn_PTD * is_noised_T[:, None])
