# SPDX-License-Identifier: Apache-2.0
"""Weights that lie in shards: brought whole where a layer opens, their gradients summed back into shards.

This is so inside a `jax.shard_map` over the whole mesh alone, where every device computes for its own rows of the batch
(training/shards.py). Anywhere else the compiler moves weights by itself, and `whole` changes nothing.
"""

import contextlib
import contextvars
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from layers.axes import in_shards, mesh_axes, several

WHOLE = "whole"  # what a weight brought whole is named, for rematerialisation
_sum_dtype = contextvars.ContextVar("sum_dtype", default=None)


@contextlib.contextmanager
def summed_in(dtype):
    """Sum gradients of the weights that the block brings whole in this type; None: in that which they are used in."""
    token = _sum_dtype.set(dtype)
    try:
        yield
    finally:
        _sum_dtype.reset(token)


def whole(weights, axes, dtype):
    """Return a tree of weights, those that lie in shards whole and in `dtype`.

    Args:
      weights: tree of arrays.
      axes: tree like it, of the names of each array's dimensions.
      dtype: that the weights are used in, and their gradients summed in, unless `summed_in` says otherwise.
    """
    if not in_shards():
        return weights
    return jax.tree.map(lambda weight, names: _gathered(weight, names, dtype), weights, axes)


def whole_in_turn(weights: dict, axes: dict, dtype, order: tuple[str, ...]) -> dict:
    """Return what `whole` does of the weights of several layers; gradients of a later layer are summed first.

    Left to itself the TPU compiler sums all of them in the end, where nothing is left to compute beside.

    Args:
      order: names in `weights` of layers, as they are used.
    """
    sum_dtype = _sum_dtype.get()

    @jax.custom_vjp
    def brought(shards):
        return whole(shards, axes, dtype)

    def backward(_, gradients):
        summed, after = dict(gradients), []
        for layer in reversed(order):
            in_turn = functools.partial(_scattered, sum_dtype=sum_dtype, after=after)
            summed[layer] = jax.tree.map(in_turn, gradients[layer], axes[layer])
            after = jax.tree.leaves(summed[layer])
        return (summed,)

    brought.defvjp(lambda shards: (brought(shards), None), backward)
    return brought(weights) if in_shards() else weights


def whole_after(x: jax.Array, weight: jax.Array, axes: tuple, dtype) -> tuple[jax.Array, jax.Array]:
    """Return `x` and what `whole` does of a weight; going back, the weight's gradient is summed before `x` goes on.

    Left to itself the TPU compiler sums the head's in the end, and holds it whole while all layers go back.
    """
    if not in_shards():
        return x, weight
    x, weight = _summed_first(x, weight)
    return x, whole(weight, axes, dtype)


@jax.custom_vjp
def _summed_first(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, weight


_summed_first.defvjp(
    lambda x, weight: ((x, weight), None), lambda _, gradients: jax.lax.optimization_barrier(gradients)
)


def _gathered(weight: jax.Array, names: tuple, dtype) -> jax.Array:
    for dim, axis in split_dims(names):
        weight = checkpoint_name(gather(weight.astype(dtype), axis, dim, _sum_dtype.get()), WHOLE)
    return weight


def _scattered(gradient: jax.Array, names: tuple, sum_dtype, after: Sequence[jax.Array]) -> jax.Array:
    for dim, axis in reversed(split_dims(names)):
        gradient = _summed(gradient, axis, dim, sum_dtype, after)
    return gradient


def split_dims(names: tuple) -> list[tuple[int, str]]:
    """Return (dimension, mesh axis) of what is split; of several axes on a dimension the last splits the finest."""
    pairs = [(dim, axis) for dim, axes in enumerate(mesh_axes(names)) for axis in reversed(several(axes))]
    return [(dim, axis) for dim, axis in pairs if jax.lax.axis_size(axis) > 1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather(shard: jax.Array, axis: str, dim: int, sum_dtype=None) -> jax.Array:
    """Return the shards of all devices of a mesh axis side by side; the gradient comes back by `scatter`."""
    return jax.lax.all_gather(shard, axis, axis=dim, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def scatter(x: jax.Array, axis: str, dim: int, sum_dtype=None) -> jax.Array:
    """Return this device's shard, along `dim`, of the sum of `x` over a mesh axis; the gradient comes by `gather`.

    It is of the type of `x`, and summed in `sum_dtype`; None: in the same.
    """
    return _summed(x, axis, dim, sum_dtype)


gather.defvjp(
    lambda shard, *how: (gather(shard, *how), None),
    lambda axis, dim, sum_dtype, _, gradient: (scatter(gradient, axis, dim, sum_dtype),),
)
scatter.defvjp(
    lambda x, *how: (scatter(x, *how), None),
    lambda axis, dim, sum_dtype, _, gradient: (gather(gradient, axis, dim, sum_dtype),),
)


def _summed(x: jax.Array, axis: str, dim: int, sum_dtype, after: Sequence[jax.Array] = ()) -> jax.Array:
    """Return what `scatter` does, by permutes along a ring, that begin when the arrays of `after` are there.

    `psum_scatter` does the same, but the TPU compiler makes an all-reduce of it that nothing is computed beside, and
    that moves twice the bytes. Half of the neighbours send their parts one way and half the other way, so that no sum
    takes more than size / 2 hops, each of which waits for the one before; the one across, half of its part each way.
    """
    size, index = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    shard = x.shape[dim] // size
    across, near = size // 2, (size - 1) // 2
    x, *_ = jax.lax.optimization_barrier((x, *after))
    dtype = sum_dtype or x.dtype

    def part_of(device, start: int = 0, stop: int = shard) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, device % size * shard + start, stop - start, dim).astype(dtype)

    def from_side(step: int, start: int, stop: int) -> jax.Array | int:
        to_next = [(i, (i + step) % size) for i in range(size)]
        on_the_way = 0
        if across > near:
            half = jax.lax.ppermute(part_of(index + step * across, start, stop), axis, to_next)
            around = [(start, shard - stop, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
            on_the_way = jax.lax.pad(half, jnp.zeros((), dtype), around)
        for hop in range(near, 0, -1):
            on_the_way = jax.lax.ppermute(on_the_way + part_of(index + step * hop), axis, to_next)
        return on_the_way

    return (part_of(index) + from_side(1, 0, shard // 2) + from_side(-1, shard // 2, shard)).astype(x.dtype)
