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
        weight = checkpoint_name(gather(weight.astype(dtype), axis, dim, _sum_dtype.get()), WHOLE)
    return weight


def _scattered(gradient: jax.Array, names: tuple, sum_dtype, after: Sequence[jax.Array]) -> jax.Array:
    for dim, axis in reversed(_split(names)):
        gradient = _summed(gradient, axis, dim, sum_dtype, after)
    return gradient


def _split(names: tuple) -> list[tuple[int, str]]:
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
    that moves twice the bytes. A shard's first half comes from size / 2 neighbours one way and from the others the
    other way, its second half the other way around: each link carries as much, and no sum takes more than size / 2
    hops, each of which waits for the one before.
    """
    size, index = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    shard = x.shape[dim] // size
    half = shard // 2

    def part_of(device, start: int, length: int) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(x, device % size * shard + start, length, dim)
        return part.astype(sum_dtype or x.dtype)

    def from_side(step: int, hops: int, *part: int) -> jax.Array | int:
        if hops == 0:
            return 0
        to_next = [(i, (i + step) % size) for i in range(size)]
        on_the_way, *_ = jax.lax.optimization_barrier((part_of(index + step * hops, *part), *after))
        for hop in range(hops - 1, 0, -1):
            on_the_way = jax.lax.ppermute(on_the_way, axis, to_next) + part_of(index + step * hop, *part)
        return jax.lax.ppermute(on_the_way, axis, to_next)

    def arrived(step: int, *part: int) -> jax.Array:
        own = part_of(index, *part)
        return own + from_side(step, size // 2, *part) + from_side(-step, (size - 1) // 2, *part)

    return jax.lax.concatenate([arrived(1, 0, half), arrived(-1, half, shard - half)], dim).astype(x.dtype)
