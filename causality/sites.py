# SPDX-License-Identifier: Apache-2.0
"""Runs of a decoder in which activations at some sites come from another run.

A site is a tap of layers/taps.py, a layer, a position and a head. Patching, tracing, ablation and interchange differ
only in the other run and in what is read from the logits, so they share `at_each_site`. It computes all sites in one
compiled program: each row of a batch replaces another site.

Call these functions with the model's mesh in context. Letters: P prompts, S sites, B rows of a batch, T positions,
L layers, D embed, N query heads, H head dim, V vocabulary.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from layers import taps
from layers.axes import mesh_axes, num_shards

NAMES = ("block", "attention", "mlp", "heads")  # taps that are replaced; a site has an index of this tuple
STREAMS = ("block", "attention", "mlp")  # of these, the ones without heads
EVERY = -1  # in a site: every layer, position or head
ROWS = 32  # of a batch, about

Read = Callable[[jax.Array, jax.Array], jax.Array]  # (logits [..., P, V], int32 [P, K]) -> float32 [..., P]


class Sites(NamedTuple):
    """Where activations are replaced: four arrays, int32 [S]. EVERY stands for all layers, positions or heads."""

    name: np.ndarray
    layer: np.ndarray
    position: np.ndarray
    head: np.ndarray


def sites_of(name: str, layers, positions=(EVERY,), heads=(EVERY,)) -> Sites:
    """Return the sites of a tap at all combinations of layers, positions and heads; the last one changes fastest."""
    grid = np.meshgrid([NAMES.index(name)], layers, positions, heads, indexing="ij")
    return Sites(*[np.asarray(array, np.int32).ravel() for array in grid])


def difference(logits: jax.Array, tokens_PK: jax.Array) -> jax.Array:
    """Return the logit of the first token minus that of the second (arXiv:2309.16042, section 2)."""
    first, second = (_chosen(logits, tokens_PK[:, k]) for k in (0, 1))
    return first - second


def probability(logits: jax.Array, tokens_PK: jax.Array) -> jax.Array:
    """Return the probability of the first token."""
    return _chosen(jax.nn.softmax(logits), tokens_PK[:, 0])


def run(graph: nnx.GraphDef, params: dict, tokens_BT: jax.Array) -> jax.Array:
    """Return float32 logits [B, V] of the token after each row; each row is one document.

    Rows and positions are padded to what the mesh in context divides, so taps see a longer batch.
    """
    B, T = tokens_BT.shape
    num_rows, length = padded(B, T)
    shape = ((0, num_rows - B), (0, length - T))
    segments_BT = jnp.pad(jnp.ones_like(tokens_BT), shape)
    positions_BT = jnp.broadcast_to(jnp.arange(length), segments_BT.shape)
    model = nnx.merge(graph, params)
    stream_BTD, _ = model(jnp.pad(tokens_BT, shape), positions_BT, segments_BT)
    return model.logits(stream_BTD[:, T - 1 : T])[:B, 0]


def padded(num_rows: int, length: int) -> tuple[int, int]:
    """Return the next numbers of rows and positions that the mesh in context divides."""
    rows, parts = (num_shards(mesh_axes((name,))[0]) for name in ("batch", "length"))
    return -(-num_rows // rows) * rows, -(-length // parts) * parts


def replicated(tree):
    """Return arrays that all devices, and so all processes, hold completely."""
    return jax.tree.map(lambda array: jax.lax.with_sharding_constraint(array, PartitionSpec()), tree)


def recorded(graph: nnx.GraphDef, params: dict, tokens_PT: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return (logits [P, V], {name: activations [L, P, T, ...] of all NAMES}); T is padded."""
    with taps.record(*NAMES) as found:
        logits_PV = run(graph, params, tokens_PT)
    return logits_PV, {name: found[name][:, : len(tokens_PT)] for name in NAMES}


@functools.partial(jax.jit, static_argnums=0)
def sources_of(graph: nnx.GraphDef, params: dict, tokens_PT: jax.Array) -> dict[str, jax.Array]:
    """Return {name: activations [L, P, T, ...]} of prompts, an argument of `at_each_site`."""
    return recorded(graph, params, tokens_PT)[1]


def check_tokens(model: nnx.Module, *arrays) -> None:
    """Raise ValueError if an array is empty, or has other values than ids of the model's vocabulary."""
    most = model.embed.embedding.shape[0] - 1
    for array in map(np.asarray, arrays):
        if not array.size or not np.issubdtype(array.dtype, np.integer) or array.min() < 0 or array.max() > most:
            raise ValueError(f"give at least one token, each a whole number from 0 to {most}")


@functools.partial(jax.jit, static_argnames=("graph", "read", "num_rows"))
def at_each_site(
    graph: nnx.GraphDef, params: dict, tokens_PT: jax.Array, sources: dict[str, jax.Array], sites: Sites, read: Read,
    of_prompts_PK: jax.Array, noise_PTD: jax.Array | None = None, *, num_rows: int = ROWS,
) -> jax.Array:  # fmt: skip
    """Return float32 [S, P]: what `read` finds in the logits of each prompt if one site is replaced.

    Args:
      tokens_PT: int32, the prompts.
      sources: {name: [L, P, T, ...]} of all NAMES as `recorded` returns them, the activations that are put in.
      read: (logits [..., P, V], of_prompts_PK) -> [..., P].
      of_prompts_PK: int32, such as the tokens that `read` compares.
      noise_PTD: is added to the embedded tokens; None: no noise.
      num_rows: of a batch, about; each site takes P of them.
    """
    num_prompts, num_sites = len(tokens_PT), len(sites.layer)
    size = max(1, min(num_rows // num_prompts, num_sites))
    groups = -(-num_sites // size)

    def of_group(group: Sites) -> jax.Array:
        tiled = [jnp.tile(tokens_PT, (size, 1))]
        if noise_PTD is not None:
            tiled.append(jnp.tile(noise_PTD, (size, 1, 1)))
        sites_B = Sites(*[jnp.repeat(array, num_prompts) for array in group])
        logits_BV = _replaced(graph, params, sources, sites_B, *tiled)
        return read(logits_BV.reshape(size, num_prompts, -1), of_prompts_PK)

    filled = [jnp.resize(array, (groups, size)) for array in sites]  # the last group begins again with the first sites
    found = jax.lax.map(of_group, Sites(*filled)).reshape(groups * size, num_prompts)[:num_sites]
    return replicated(found.astype(jnp.float32))


@contextlib.contextmanager
def changed(changes: dict[str, jax.Array]) -> Iterator[None]:
    """Add arrays {name: [L, P, T, ...]} of the shapes of `recorded` to the activations, for gradients."""
    with contextlib.ExitStack() as contexts:
        for name, change in changes.items():
            contexts.enter_context(taps.replace(name, functools.partial(_added, change)))
        yield


def _replaced(
    graph: nnx.GraphDef, params: dict, sources: dict, sites_B: Sites, tokens_BT: jax.Array,
    noise_BTD: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Return logits [B, V] of rows, each with the source's activation at the site of this row."""
    with contextlib.ExitStack() as contexts:
        if noise_BTD is not None:
            contexts.enter_context(taps.replace("embed", functools.partial(_with_noise, noise_BTD)))
        for number, name in enumerate(NAMES):
            replacement = functools.partial(_with_source, sources[name], number, sites_B)
            contexts.enter_context(taps.replace(name, replacement))
        return run(graph, params, tokens_BT)


def _with_source(source_LPT: jax.Array, number: int, sites_B: Sites, x: jax.Array, layer: jax.Array) -> jax.Array:
    """Return activations [B, T, ...]; at the site of each row they are the source's."""
    of_layer = source_LPT[layer]
    of_layer = jnp.tile(of_layer, (len(sites_B.name) // len(of_layer), *[1] * (x.ndim - 1)))
    is_here_B = (sites_B.name == number) & _is_at(sites_B.layer, layer)
    chosen = is_here_B[:, None] & _is_at(sites_B.position[:, None], jnp.arange(x.shape[1]))
    if x.ndim == 4:
        chosen = chosen[..., None] & _is_at(sites_B.head[:, None, None], jnp.arange(x.shape[2]))
    chosen = jnp.pad(chosen, ((0, len(x) - len(chosen)), *[(0, 0)] * (chosen.ndim - 1)))
    return jnp.where(chosen[..., None], _fitted(of_layer, x), x)


def _is_at(wanted: jax.Array, number: jax.Array) -> jax.Array:
    return (wanted == EVERY) | (wanted == number)


def _added(change: jax.Array, x: jax.Array, layer: jax.Array) -> jax.Array:
    return x + _fitted(change[layer], x)


def _with_noise(noise_BTD: jax.Array, x_BTD: jax.Array, layer: None) -> jax.Array:
    return x_BTD + _fitted(noise_BTD, x_BTD)


def _fitted(values: jax.Array, x: jax.Array) -> jax.Array:
    """Return values in the type and the shape of `x`, with zeros at the end of shorter dimensions."""
    shape = [(0, size - given) for size, given in zip(x.shape, values.shape, strict=True)]
    return jnp.pad(values, shape).astype(x.dtype)


def _chosen(values: jax.Array, tokens_P: jax.Array) -> jax.Array:
    """Return the value [..., P] of one token of each prompt; values: [..., P, V]."""
    tokens = jnp.broadcast_to(tokens_P, values.shape[:-1])
    return jnp.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]
