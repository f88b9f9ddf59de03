# SPDX-License-Identifier: Apache-2.0
"""Which activations of a decoder carry what distinguishes two prompts: patching, attribution and the logit lens.

The two prompts have the same number of tokens. A figure of a site is normalised: 0 is the corrupted run, and 1 is the
clean run (arXiv:2309.16042, section 2):

    (difference - difference_corrupt) / (difference_clean - difference_corrupt)

where a difference is logit(answer) - logit(other) after the last token. Letters as in causality/sites.py.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from causality.sites import (
    NAMES,
    ROWS,
    STREAMS,
    Read,
    Sites,
    at_each_site,
    changed,
    check_tokens,
    difference,
    recorded,
    replicated,
    run,
    sites_of,
    sources_of,
)  # fmt: skip


class Contrast(NamedTuple):
    """Two prompts, and the tokens whose logits are compared after them."""

    clean_T: np.ndarray  # int32
    corrupt_T: np.ndarray  # int32
    answer: int  # the likeliest token after the clean prompt
    other: int  # the likeliest other token after the corrupted prompt
    clean: float  # logit(answer) - logit(other) after the clean prompt
    corrupt: float  # the same after the corrupted prompt

    @property
    def tokens_PK(self) -> np.ndarray:
        """The two tokens as `difference` reads them."""
        return np.array([[self.answer, self.other]], np.int32)

    def normalized(self, differences: np.ndarray) -> np.ndarray:
        """Return differences on the scale from 0, the corrupted run, to 1, the clean run."""
        return (differences - self.corrupt) / (self.clean - self.corrupt)


Tables = dict[str, np.ndarray]  # {name: float32 [L, T]} of STREAMS, and "heads" [L, N]
NOWHERE = sites_of("block", [-2])  # no layer has this number, so nothing is replaced


def contrast(
    graph: nnx.GraphDef, params: dict, clean_T: np.ndarray, corrupt_T: np.ndarray, tokens: tuple[int, int] | None = None
) -> Contrast:
    """Return two prompts with the tokens that are compared.

    Args:
      clean_T, corrupt_T: int [T], of the same length, at least one token.
      tokens: (answer, other); None: those that the model finds likeliest.

    Raises:
      ValueError: the prompts have different lengths, or have tokens that the vocabulary lacks.
    """
    if len(clean_T) != len(corrupt_T):
        raise ValueError(f"the prompts have {len(clean_T)} and {len(corrupt_T)} tokens; give prompts of equal length")
    prompts_PT, model = np.stack([clean_T, corrupt_T]), nnx.merge(graph, params)
    check_tokens(model, prompts_PT, *([tokens] if tokens else []))
    clean_V, corrupt_V = np.asarray(_logits(graph, params, prompts_PT.astype(np.int32)))
    if tokens is None:
        answer = int(clean_V.argmax())
        others_V = corrupt_V.copy()
        others_V[answer] = -np.inf
        tokens = answer, int(others_V.argmax())
    clean, corrupt = (float(logits_V[tokens[0]] - logits_V[tokens[1]]) for logits_V in (clean_V, corrupt_V))
    return Contrast(np.asarray(clean_T, np.int32), np.asarray(corrupt_T, np.int32), *tokens, clean, corrupt)


def all_sites(num_layers: int, length: int, num_heads: int) -> Sites:
    """Return the sites of all tables: layers by positions for each of STREAMS, and layers by heads."""
    layers, positions = range(num_layers), range(length)
    parts = [sites_of(name, layers, positions) for name in STREAMS]
    parts.append(sites_of("heads", layers, heads=range(num_heads)))
    return Sites(*[np.concatenate(arrays) for arrays in zip(*parts, strict=True)])


def at_all_sites(
    graph: nnx.GraphDef, params: dict, tokens_PT: np.ndarray, sources: dict[str, jax.Array], read: Read,
    of_prompts_PK: np.ndarray, noise_PTD: jax.Array | None = None, *, num_rows: int = ROWS,
) -> tuple[np.ndarray, Tables]:  # fmt: skip
    """Return (the figure without a replacement, the tables of `at_each_site` at all sites), means over the prompts."""
    num_layers, length, num_heads = sources["block"].shape[0], tokens_PT.shape[1], sources["heads"].shape[3]
    sites = Sites(*map(np.concatenate, zip(NOWHERE, all_sites(num_layers, length, num_heads), strict=True)))
    found_SP = at_each_site(graph, params, tokens_PT, sources, sites, read, of_prompts_PK, noise_PTD, num_rows=num_rows)
    intact, *found_S = np.asarray(found_SP).mean(axis=1)
    rows = np.split(np.asarray(found_S), [num_layers * length * n for n in (1, 2, 3)])
    return intact, {name: row.reshape(num_layers, -1) for name, row in zip(NAMES, rows, strict=True)}


def restore(graph: nnx.GraphDef, params: dict, pair: Contrast, *, num_rows: int = ROWS) -> Tables:
    """Return the normalised effect of each activation of the clean run that is put into the corrupted run.

    This is activation patching, "denoising" in arXiv:2309.16042. A head is patched at all positions.
    """
    sources = sources_of(graph, params, pair.clean_T[None])
    _, tables = at_all_sites(
        graph, params, pair.corrupt_T[None], sources, difference, pair.tokens_PK, num_rows=num_rows
    )
    return {name: pair.normalized(table) for name, table in tables.items()}


def attribute(graph: nnx.GraphDef, params: dict, pair: Contrast) -> Tables:
    """Return the first-order estimate of `restore`: (clean - corrupted activation) * gradient of the difference.

    The gradient is that of the corrupted run, so all sites take one forward and one backward pass
    (attribution patching, arXiv:2310.10348, section 2).
    """
    found = _attributed(graph, params, pair.clean_T[None], pair.corrupt_T[None], pair.tokens_PK)
    tables = {name: np.asarray(array)[:, : len(pair.clean_T)] for name, array in found.items() if name in STREAMS}
    tables["heads"] = np.asarray(found["heads"])
    return {name: table / (pair.clean - pair.corrupt) for name, table in tables.items()}


class Lens(NamedTuple):
    """What the model would predict if it ended after a block: likeliest tokens int32 [L, T], probabilities [L, T]."""

    likeliest_LT: np.ndarray
    probability_LT: np.ndarray
    answer_LT: np.ndarray


def logit_lens(graph: nnx.GraphDef, params: dict, tokens_T: np.ndarray, answer: int) -> Lens:
    """Return the likeliest token after each block and position, its probability, and that of the answer.

    The final norm and the head are applied to the residual stream (nostalgebraist, "interpreting GPT: the logit lens",
    2020). Raises ValueError for tokens that the vocabulary lacks.
    """
    check_tokens(nnx.merge(graph, params), tokens_T, answer)
    found = _lens(graph, params, np.asarray(tokens_T, np.int32)[None], answer)
    return Lens(*[np.asarray(array)[:, : len(tokens_T)] for array in found])


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph: nnx.GraphDef, params: dict, tokens_PT: jax.Array) -> jax.Array:
    return replicated(run(graph, params, tokens_PT))


@functools.partial(jax.jit, static_argnums=0)
def _attributed(graph: nnx.GraphDef, params: dict, clean_PT, corrupt_PT, tokens_PK) -> dict[str, jax.Array]:
    """Return {name: [L, T], or [L, N] of heads}, not normalised."""
    clean, corrupt = (recorded(graph, params, tokens)[1] for tokens in (clean_PT, corrupt_PT))

    def of_change(change: dict[str, jax.Array]) -> jax.Array:
        with changed(change):
            return difference(run(graph, params, corrupt_PT), tokens_PK).sum()

    gradients = jax.grad(of_change)(jax.tree.map(jnp.zeros_like, corrupt))
    products = jax.tree.map(lambda to, at, slope: ((to - at) * slope).astype(jnp.float32), clean, corrupt, gradients)
    found = {name: products[name].sum((1, 3)) for name in STREAMS} | {"heads": products["heads"].sum((1, 2, 4))}
    return replicated(found)


@functools.partial(jax.jit, static_argnums=0)
def _lens(graph: nnx.GraphDef, params: dict, tokens_PT: jax.Array, answer: jax.Array) -> tuple[jax.Array, ...]:
    block_LPTD, model = recorded(graph, params, tokens_PT)[1]["block"], nnx.merge(graph, params)

    def of_layer(x_PTD: jax.Array) -> tuple[jax.Array, ...]:
        probability_TV = jax.nn.softmax(model.logits(model.norm(x_PTD)))[0]
        return probability_TV.argmax(-1), probability_TV.max(-1), probability_TV[:, answer]

    return replicated(jax.lax.map(of_layer, block_LPTD))
