# SPDX-License-Identifier: Apache-2.0
"""Moves live arrays from their mesh to another one of the same devices, without a file and without the host."""

import math
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding


class Moved(NamedTuple):
    """Bytes that devices are sent by others: the device that is sent most, and all of them together."""

    most: int
    total: int


def reshape(tree, layouts):
    """Return the arrays of `tree` as `layouts` says; the old ones are deleted.

    An array is moved after the other, and its old shards freed before the next one's turn: beside the state there is
    at most one array's new shards, and what the compiler needs to bring them, at worst that array whole. No value
    changes. In several processes each calls it, with the same trees, outside any mesh's context.

    Args:
      tree: of arrays with NamedShardings, any types; not used again.
      layouts: like it, of anything with a `sharding` on a mesh of the same devices, in any order.
    """
    return jax.tree.map(lambda array, layout: _moved(array, layout.sharding), tree, layouts)


def bytes_moved(tree, layouts) -> Moved:
    """Return what a `reshape` has to send: of its new shard each device has what it held already.

    Args:
      tree: of arrays, or of shapes with a `sharding`.
      layouts: as in `reshape`.
    """
    sent: dict[jax.Device, int] = {}
    for array, layout in zip(jax.tree.leaves(tree), jax.tree.leaves(layouts), strict=True):
        before, after = (of.sharding.devices_indices_map(array.shape) for of in (array, layout))
        for device, new in after.items():
            missing = _numbers(new, new, array.shape) - _numbers(before[device], new, array.shape)
            sent[device] = sent.get(device, 0) + missing * array.dtype.itemsize
    return Moved(max(sent.values(), default=0), sum(sent.values()))


def _moved(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    if array.sharding == sharding:
        return array
    # device_put of arrays that one process holds goes through the host where the order of devices stays the same.
    same_order = array.sharding.mesh.devices.ravel().tolist() == sharding.mesh.devices.ravel().tolist()
    moved = jax.jit(_same, out_shardings=sharding)(array) if same_order else jax.device_put(array, sharding)
    moved.block_until_ready()
    array.delete()
    return moved


def _same(array: jax.Array) -> jax.Array:
    return array


def _numbers(one: tuple[slice, ...], other: tuple[slice, ...], shape: tuple[int, ...]) -> int:
    """Return how many numbers of an array two parts of it have in common."""
    bounds = (zip(a.indices(size), b.indices(size), strict=True) for a, b, size in zip(one, other, shape, strict=True))
    return math.prod(max(0, min(ends) - max(starts)) for starts, ends, _ in bounds)
