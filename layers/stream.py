# SPDX-License-Identifier: Apache-2.0
"""The residual stream where devices share heads and MLP, `mesh.model`: each has a part of its length.

Attention and MLP open it, to compute their heads and columns for the whole length, and close what they add to it: the
sum over the devices, of which each keeps its part (arXiv:2205.05198, section 4.2.2). As with weights in shards this is
so inside a `jax.shard_map` over the whole mesh alone; anywhere else the functions change nothing.
"""

import math

import jax
from jax.ad_checkpoint import checkpoint_name

from layers.axes import in_shards, mesh_axes, several
from layers.shards import gather, scatter

CLOSED = "closed"  # what a closed sum is named, for rematerialisation: without it, it goes round again


def opened(x: jax.Array) -> jax.Array:
    """Return the whole length of [B, T, ...]."""
    for axis in _axes():
        x = gather(x, axis, 1)
    return x


def closed(y_BTD: jax.Array) -> jax.Array:
    """Return this device's part of the length of [B, T, D], summed over the devices."""
    for axis in _axes():
        y_BTD = checkpoint_name(scatter(y_BTD, axis, 1), CLOSED)
    return y_BTD


def summed(x: jax.Array) -> jax.Array:
    """Return the sum of what each of the devices that share a length has for its part of it."""
    axes = _axes()
    return jax.lax.psum(x, axes) if axes else x


def num_holders() -> int:
    """Return how many devices share a length, each with a part of it."""
    return math.prod(jax.lax.axis_size(axis) for axis in _axes())


def num_parts(batch: int) -> int:
    """Return into how many parts of its rows the stream goes through layers: while one goes round, another computes."""
    return 2 if _axes() and batch % 2 == 0 else 1


def _axes() -> list[str]:
    """Return the mesh axes that split the length."""
    if not in_shards():
        return []
    return [axis for axis in several(mesh_axes(("stream",))[0]) if jax.lax.axis_size(axis) > 1]
