# SPDX-License-Identifier: Apache-2.0
"""Fully sharded parameters: all-gather each layer's weights before use, reduce-scatter their gradients.

These functions act inside a `jax.shard_map` over the whole mesh, where every device computes for its own rows of the
batch (training/shard_map.py). Anywhere else they change nothing: the compiler inserts the collectives.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import spmd
from flax.traverse_util import unflatten_dict
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from layers.axes import as_axis_tuple, declared_axes, inside_shard_map, mesh_axes, platform

WHOLE_TORUS = 64  # an axis of at least this many devices communicates in two steps, see `steps_of`
LARGE = 1 << 26  # elements of a weight that such an axis gathers by permutes, which overlap with a grouped kernel
REDUCE_SCATTER = "reduce_scatter"  # scope of the collectives that add up gradients
GATHERED_PARAM = "gathered_param"  # checkpoint_name of a gathered weight: rematerialisation gathers it again
_reduce_dtype = contextvars.ContextVar("reduce_dtype", default=None)


@contextlib.contextmanager
def grad_reduce_dtype(dtype):
    """Reduce-scatter gradients of gathered weights in this type; None: in the type that a weight is used in."""
    token = _reduce_dtype.set(dtype)
    try:
        yield
    finally:
        _reduce_dtype.reset(token)


def all_gather_params(weights, axes, dtype):
    """Return a tree of weights whose sharded leaves are cast to `dtype` and all-gathered.

    Args:
      weights: tree of arrays.
      axes: tree like it, of the names of each array's dimensions.
      dtype: type of the gathered weights. Their gradients are reduced in it too, unless `grad_reduce_dtype` is set.
    """
    if not inside_shard_map():
        return weights
    return jax.tree.map(lambda weight, names: _all_gather_param(weight, names, dtype), weights, axes)


def all_gather_state(state: nnx.State, dtype) -> dict:
    """Return the parameters of a state as `all_gather_params` does, by the names that their declarations give."""
    axes = unflatten_dict({path: names for path, (_, names) in declared_axes(state).items()})
    return all_gather_params(nnx.to_pure_dict(state), axes, dtype)


def all_gather_params_ordered(weights: dict, axes: dict, dtype, order: tuple[str, ...]) -> dict:
    """All-gather the weights of several layers; in the backward pass, reduce-scatter the last layer's gradients first.

    Without this order the TPU compiler reduces all gradients at the end, when no computation is left to overlap with.

    Args:
      order: names in `weights` of layers, in order of use.
    """
    reduce_dtype, rules = _reduce_dtype.get(), spmd.get_logical_axis_rules()

    @jax.custom_vjp
    def gathered(shards):
        return all_gather_params(shards, axes, dtype)

    def backward(_, gradients):
        reduced, after = dict(gradients), []
        with nnx.logical_axis_rules(rules):  # it is traced where others may hold, as after layers/axes.py: unsharded
            for layer in reversed(order):
                in_order = functools.partial(_reduce_scatter_grad, reduce_dtype=reduce_dtype, after=after)
                reduced[layer] = jax.tree.map(in_order, gradients[layer], axes[layer])
                after = jax.tree.leaves(reduced[layer])
        return (reduced,)

    gathered.defvjp(lambda shards: (gathered(shards), None), backward)
    return gathered(weights) if inside_shard_map() else weights


def all_gather_reduce_first(x: jax.Array, weight: jax.Array, axes: tuple, dtype) -> tuple[jax.Array, jax.Array]:
    """Return `x` and the all-gathered weight; the backward pass reduces the weight's gradient before that of `x`.

    Without this order the TPU compiler reduces the head's gradient at the end, and holds the full gradient in memory
    during the backward pass of all layers.
    """
    if not inside_shard_map():
        return x, weight
    x, weight = _reduce_first(x, weight)
    return x, all_gather_params(weight, axes, dtype)


@jax.custom_vjp
def _reduce_first(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, weight


_reduce_first.defvjp(
    lambda x, weight: ((x, weight), None), lambda _, gradients: jax.lax.optimization_barrier(gradients)
)


def _all_gather_param(weight: jax.Array, names: tuple, dtype) -> jax.Array:
    for dim, axis in sharded_dims(names):
        weight = checkpoint_name(all_gather(weight.astype(dtype), axis, dim, _reduce_dtype.get()), GATHERED_PARAM)
    return weight


def _reduce_scatter_grad(gradient: jax.Array, names: tuple, reduce_dtype, after: Sequence[jax.Array]) -> jax.Array:
    for dim, axis in reversed(sharded_dims(names)):
        gradient = ring_reduce_scatter(gradient, axis, dim, reduce_dtype, after)
    return gradient


def sharded_dims(names: tuple) -> list[tuple[int, str]]:
    """Return (dimension, mesh axis) pairs in the order of all-gathers.

    If several mesh axes shard one dimension, the last axis has the finest shards and is gathered first.
    """
    pairs = [(dim, axis) for dim, axes in enumerate(mesh_axes(names)) for axis in reversed(as_axis_tuple(axes))]
    return [(dim, axis) for dim, axis in pairs if jax.lax.axis_size(axis) > 1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def all_gather(shard: jax.Array, axis: str, dim: int, reduce_dtype=None) -> jax.Array:
    """All-gather the shards of a mesh axis along `dim`; the gradient is reduce-scattered."""
    blocks, block = steps_of(jax.lax.axis_size(axis))
    if blocks == 1:
        return jax.lax.all_gather(shard, axis, axis=dim, tiled=True)
    if shard.size * blocks * block >= LARGE:
        return _gather_along_ring(_gather_along_ring(shard, axis, dim, block), axis, dim, blocks, stride=block)
    of_blocks = [[*range(first, first + block)] for first in range(0, blocks * block, block)]
    of_places = [[*range(place, blocks * block, block)] for place in range(block)]
    for groups in (of_blocks, of_places):
        shard = jax.lax.all_gather(shard, axis, axis=dim, tiled=True, axis_index_groups=groups)
    return shard


def _gather_along_ring(shard: jax.Array, axis: str, dim: int, size: int, *, stride: int = 1) -> jax.Array:
    """All-gather by permutes in both directions of rings of `size` devices, whose numbers are `stride` apart."""
    index = jax.lax.axis_index(axis) // stride % size
    received = [(0, shard)]
    for step, hops in ((1, size // 2), (-1, (size - 1) // 2)):
        part, to_next = shard, _neighbours(jax.lax.axis_size(axis), size, stride, step)
        for hop in range(1, hops + 1):
            part = jax.lax.ppermute(part, axis, to_next)
            received.append((-step * hop, part))
    length = shard.shape[dim]
    whole = _empty_like_p.bind(shard, shape=(*shard.shape[:dim], size * length, *shard.shape[dim + 1 :]))
    for distance, part in received:
        whole = jax.lax.dynamic_update_slice_in_dim(whole, part, (index + distance) % size * length, dim)
    return whole


# `jax.lax.empty` of a shape, in the type of an operand. Without an operand, the gradient of a scan makes the array
# once, before the loop, and each layer copies it before it writes to it.
_empty_like_p = Primitive("empty_like")
_empty_like_p.def_abstract_eval(lambda x, *, shape: jax.core.ShapedArray(shape, x.dtype))
mlir.register_lowering(
    _empty_like_p, mlir.lower_fun(lambda x, *, shape: jax.lax.empty(shape, x.dtype), multiple_results=False)
)


def _batched_empty_like(operands, dims, *, shape):
    [x], [dim] = operands, dims
    return _empty_like_p.bind(x, shape=(x.shape[dim], *shape)), 0


batching.primitive_batchers[_empty_like_p] = _batched_empty_like


def steps_of(size: int) -> tuple[int, int]:
    """Return (blocks, devices of a block) in which an axis communicates: (1, size) is one step.

    The TPU compiler turns an all-gather over all devices of a three-dimensional torus into an all-reduce of zeros and
    shards, which moves twice the bytes and overlaps with no computation. Two steps, over the devices of a block and
    over those of one place in all blocks, stay all-gathers. A reduce-scatter in two steps has fewer hops.
    """
    if size < WHOLE_TORUS:
        return 1, size
    blocks = max(number for number in range(1, math.isqrt(size) + 1) if size % number == 0)
    return blocks, size // blocks


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def reduce_scatter(x: jax.Array, axis: str, dim: int, reduce_dtype=None) -> jax.Array:
    """Reduce-scatter `x` over a mesh axis along `dim`; the gradient is all-gathered.

    The result has the type of `x`. The sum is computed in `reduce_dtype`; None: in the type of `x`.
    """
    return ring_reduce_scatter(x, axis, dim, reduce_dtype)


all_gather.defvjp(
    lambda shard, *how: (all_gather(shard, *how), None),
    lambda axis, dim, reduce_dtype, _, gradient: (reduce_scatter(gradient, axis, dim, reduce_dtype),),
)
reduce_scatter.defvjp(
    lambda x, *how: (reduce_scatter(x, *how), None),
    lambda axis, dim, reduce_dtype, _, gradient: (all_gather(gradient, axis, dim, reduce_dtype),),
)


@jax.named_scope(REDUCE_SCATTER)
def ring_reduce_scatter(
    x: jax.Array, axis: str, dim: int, reduce_dtype, after: Sequence[jax.Array] = ()
) -> jax.Array:  # fmt: skip
    """Reduce-scatter `x` along rings, by permutes or on a CPU at once, when the arrays of `after` are ready.

    `psum_scatter` computes the same. The TPU compiler lowers it to an all-reduce, which moves twice the bytes and
    overlaps with no computation. Half of the neighbours send their parts in one direction and half in the other, so no
    sum takes more than size / 2 hops, and each hop waits for the previous one. With an even size, the opposite device
    sends half of its part in each direction.
    """
    x, *_ = jax.lax.optimization_barrier((x, *after))
    dtype = reduce_dtype or x.dtype
    size = jax.lax.axis_size(axis)
    blocks, block = steps_of(size)
    if blocks == 1:
        sum_parts = _sum_at_once if platform() == "cpu" else _sum_along_ring
        return sum_parts(x, axis, dim, dtype, size).astype(x.dtype)
    before, after_dim = x.shape[:dim], x.shape[dim + 1 :]
    parts = _sum_along_ring(x.reshape(*before, blocks, -1, *after_dim), axis, dim + 1, dtype, block)
    parts = parts.reshape(*before, -1, *after_dim)
    return _sum_along_ring(parts, axis, dim, dtype, blocks, stride=block).astype(x.dtype)


def _sum_along_ring(x: jax.Array, axis: str, dim: int, dtype, size: int, *, stride: int = 1) -> jax.Array:
    """Reduce-scatter `x` over rings of `size` devices, whose numbers on the axis are `stride` apart."""
    index = jax.lax.axis_index(axis) // stride % size
    shard = x.shape[dim] // size
    across, near = size // 2, (size - 1) // 2

    def part_of(device, start: int = 0, stop: int = shard) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, device % size * shard + start, stop - start, dim).astype(dtype)

    def from_side(step: int, start: int, stop: int) -> jax.Array | int:
        to_next = _neighbours(jax.lax.axis_size(axis), size, stride, step)
        partial_sum = 0
        if across > near:
            half = jax.lax.ppermute(part_of(index + step * across, start, stop), axis, to_next)
            padding = [(start, shard - stop, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
            partial_sum = jax.lax.pad(half, jnp.zeros((), dtype), padding)
        for hop in range(near, 0, -1):
            partial_sum = jax.lax.ppermute(partial_sum + part_of(index + step * hop), axis, to_next)
        return partial_sum

    return part_of(index) + from_side(1, 0, shard // 2) + from_side(-1, shard // 2, shard)


def _sum_at_once(x: jax.Array, axis: str, dim: int, dtype, size: int) -> jax.Array:
    """Return what `_sum_along_ring` returns, to the same bits: each device adds up its parts in the order of the ring.

    Simulated devices share the cores of a machine, and all of them wait for each permute. This needs one all-to-all.
    """
    parts = jax.lax.all_to_all(x, axis, dim, dim, tiled=True).astype(dtype)
    parts = parts.reshape(*x.shape[:dim], size, -1, *x.shape[dim + 1 :])
    parts = jnp.take(parts, (jax.lax.axis_index(axis) - jnp.arange(size)) % size, axis=dim)  # by distance of the sender
    across, near, half = size // 2, (size - 1) // 2, parts.shape[dim + 1] // 2

    def as_sent(partial_sum: jax.Array) -> jax.Array:
        """Round to `dtype`, which the compiler otherwise leaves out between two additions."""
        return jax.lax.reduce_precision(partial_sum, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)

    def from_side(step: int) -> jax.Array | int:
        partial_sum = 0
        if across > near:
            opposite = jax.lax.index_in_dim(parts, across, dim, keepdims=False)
            place = jnp.arange(opposite.shape[dim]).reshape(-1, *[1] * (x.ndim - dim - 1))
            partial_sum = jnp.where((place < half) == (step > 0), opposite, 0)
        for hop in range(near, 0, -1):
            sender = jax.lax.index_in_dim(parts, step * hop % size, dim, keepdims=False)
            partial_sum = as_sent(sender + partial_sum)
        return partial_sum

    return jax.lax.index_in_dim(parts, 0, dim, keepdims=False) + from_side(1) + from_side(-1)


def _neighbours(num_devices: int, size: int, stride: int, step: int) -> list[tuple[int, int]]:
    """Return pairs (device, the device `step` further on its ring)."""
    places = [device // stride % size for device in range(num_devices)]
    return [(device, device + stride * ((place + step) % size - place)) for device, place in enumerate(places)]
