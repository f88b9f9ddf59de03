# SPDX-License-Identifier: Apache-2.0
"""Weights that lie in shards: brought whole where a layer opens, their gradients summed back into shards.

This is so inside a `jax.shard_map` over the whole mesh alone, where every device computes for its own rows of the batch
(training/shards.py). Anywhere else the compiler moves weights by itself, and `whole` changes nothing.
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name

from layers.axes import in_shards, mesh_axes, several

WHOLE = "whole"  # what a weight brought whole is named, for rematerialisation


def whole(weights, axes, dtype):
    """Return a tree of weights, those that lie in shards whole and in `dtype`.

    Args:
      weights: tree of arrays.
      axes: tree like it, of the names of each array's dimensions.
      dtype: that the weights are used in, and their gradients summed in.
    """
    if not in_shards():
        return weights
    return jax.tree.map(lambda weight, names: _gathered(weight, names, dtype), weights, axes)


def ready(weights, axes, dtype):
    """Return a tree of weights, those that `whole` is going to bring in `dtype`; so are their gradients until the end.

    For a stack of layers: the compiler casts it as one anyway, and its gradients take half the memory. `axes` are those
    of a layer.
    """
    if not in_shards():
        return weights
    return jax.tree.map(lambda weight, names: weight.astype(dtype) if _split(names) else weight, weights, axes)


def _gathered(weight: jax.Array, names: tuple, dtype) -> jax.Array:
    for dim, axis in _split(names):
        weight = checkpoint_name(gather(weight.astype(dtype), axis, dim), WHOLE)
    return weight


def _split(names: tuple) -> list[tuple[int, str]]:
    """Return (dimension, mesh axis) of what is split; of several axes on a dimension the last splits the finest."""
    pairs = [(dim, axis) for dim, axes in enumerate(mesh_axes(names)) for axis in reversed(several(axes))]
    return [(dim, axis) for dim, axis in pairs if jax.lax.axis_size(axis) > 1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(shard: jax.Array, axis: str, dim: int) -> jax.Array:
    """Return the shards of all devices of a mesh axis side by side; the gradient comes back by `scatter`."""
    return jax.lax.all_gather(shard, axis, axis=dim, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Return this device's shard, along `dim`, of the sum of `x` over a mesh axis; the gradient comes by `gather`.

    Two rings of permutes, a half of each shard going round each way: `psum_scatter` does the same, but the TPU compiler
    makes an all-reduce of it that nothing is computed beside, and that moves twice the bytes.
    """
    size, index = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    shard = x.shape[dim] // size

    def ring(start: int, length: int, step: int) -> jax.Array:
        def part_of(device):
            return jax.lax.dynamic_slice_in_dim(x, device % size * shard + start, length, dim)

        # What is on its way to a device begins at the one after it, and gathers a part at each of the others.
        on_the_way = part_of(index - step)
        for hop in range(2, size + 1):
            on_the_way = jax.lax.ppermute(on_the_way, axis, [(i, (i + step) % size) for i in range(size)])
            on_the_way += part_of(index - step * hop)
        return on_the_way

    half = shard // 2
    return jax.lax.concatenate([ring(0, half, 1), ring(half, shard - half, -1)], dim)


gather.defvjp(
    lambda shard, axis, dim: (gather(shard, axis, dim), None),
    lambda axis, dim, _, gradient: (scatter(gradient, axis, dim),),
)
scatter.defvjp(
    lambda x, axis, dim: (scatter(x, axis, dim), None),
    lambda axis, dim, _, gradient: (gather(gradient, axis, dim),),
)
