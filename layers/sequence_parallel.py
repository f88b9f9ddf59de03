# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism over `mesh.model` (arXiv:2205.05198, section 4.2.2).

The residual stream is sharded by length. Attention and MLP all-gather it on entry, compute their heads and columns for
the whole length, and reduce-scatter their output. Like layers/fsdp.py, these functions act inside a `jax.shard_map`
over the whole mesh; anywhere else they change nothing.
"""

import math

import jax
from jax.ad_checkpoint import checkpoint_name

from layers.axes import as_axis_tuple, inside_shard_map, mesh_axes
from layers.fsdp import all_gather, reduce_scatter

REDUCED = "reduced"  # checkpoint_name of a reduce-scattered output: without it, rematerialisation communicates again


def all_gather_sequence(x: jax.Array) -> jax.Array:
    """All-gather [B, T, ...] along its length."""
    for axis in _axes():
        x = all_gather(x, axis, 1)
    return x


def reduce_scatter_sequence(y_BTD: jax.Array) -> jax.Array:
    """Reduce-scatter [B, T, D] along its length."""
    for axis in _axes():
        y_BTD = checkpoint_name(reduce_scatter(y_BTD, axis, 1), REDUCED)
    return y_BTD


def psum_sequence(x: jax.Array) -> jax.Array:
    """All-reduce `x` over the devices that share a sequence."""
    axes = _axes()
    return jax.lax.psum(x, axes) if axes else x


def sequence_shards() -> int:
    """Return the number of devices that share a sequence."""
    return math.prod(jax.lax.axis_size(axis) for axis in _axes())


def overlap_splits(batch: int) -> int:
    """Return the number of parts that a layer splits its rows into, so that one computes while another communicates."""
    return 2 if _axes() and batch % 2 == 0 else 1


def _axes() -> list[str]:
    """Return the mesh axes that shard the length."""
    if not inside_shard_map():
        return []
    return [axis for axis in as_axis_tuple(mesh_axes(("stream",))[0]) if jax.lax.axis_size(axis) > 1]
