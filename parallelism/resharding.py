# SPDX-License-Identifier: Apache-2.0
"""Reshard live arrays to another mesh of the same devices, without a file and without the host."""

import math

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# From this size on layers are resharded one by one. Between some layouts the TPU compiler all-gathers the full array,
# for example from fsdp=16 to data=2, fsdp=4, model=2; on the way back even twice.
LARGE_BYTES = 2**26


def reshard(tree, layouts):
    """Return the arrays of `tree` with the shardings of `layouts`; the old arrays are deleted.

    Arrays are resharded one after the other, and the old shards are freed before the next array. So a device needs
    extra memory for the new shards of one array, twice if devices change their order, and for the temporary arrays of
    the compiler, which for stacked layers are one or two layers. Values do not change. Every process must call it with
    the same trees. An array may stand in several places, with the same layout in each; it is moved once.

    Args:
      tree: arrays with NamedShardings; donated.
      layouts: tree like it, of anything with a `sharding` on a mesh of the same devices, in any order.
    """
    moved: dict[int, jax.Array] = {}  # by id of the old array

    def move(array, layout):
        if id(array) not in moved:
            moved[id(array)] = _moved(array, layout.sharding)
        return moved[id(array)]

    return jax.tree.map(move, tree, layouts)


def to_mesh(tree, mesh: Mesh):
    """Return the arrays of `tree` on another mesh, each with its own PartitionSpec, as `reshard` does.

    An array that is not on these devices, of numpy or on one of them, is copied to each.

    Raises:
      ValueError: an axis does not divide a dimension; nothing is moved.
    """

    def placed(leaf):
        sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
        is_placed = isinstance(sharding, NamedSharding) and sharding.device_set == set(mesh.devices.flat)
        return leaf if is_placed else jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))

    def layout(array):
        sharding = NamedSharding(mesh, array.sharding.spec)
        sharding.shard_shape(array.shape)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    tree = jax.tree.map(placed, tree)
    return reshard(tree, jax.tree.map(layout, tree))


def bytes_received(tree, layouts) -> tuple[int, int]:
    """Return the bytes that devices do not hold yet: the most of any device, and the sum over devices.

    This is a lower bound; the compiler may send more. `tree` may have abstract arrays with a `sharding`.
    """
    sent: dict[jax.Device, int] = {}
    for array, layout in zip(jax.tree.leaves(tree), jax.tree.leaves(layouts), strict=True):
        before, after = (of.sharding.devices_indices_map(array.shape) for of in (array, layout))
        for device, new in after.items():
            missing = _overlap_size(new, new, array.shape) - _overlap_size(before[device], new, array.shape)
            sent[device] = sent.get(device, 0) + missing * array.dtype.itemsize
    return max(sent.values(), default=0), sum(sent.values())


def _moved(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    if array.sharding == sharding:
        return array
    # First reshard to the new mesh shape with devices in the old order, which jit requires. Then, if the order differs,
    # complete shards move to other devices.
    old, new = array.sharding.mesh, sharding.mesh
    mesh = Mesh(old.devices.reshape(new.devices.shape), new.axis_names, axis_types=new.axis_types)
    between = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    part = NamedSharding(mesh, PartitionSpec(*sharding.spec[1:])) if _in_parts(array, sharding) else None
    with jax.set_mesh(mesh):
        laid = jax.jit(_laid, static_argnums=1, out_shardings=between)(array, part).block_until_ready()
    array.delete()
    with jax.set_mesh(new):
        return jax.device_put(laid, sharding).block_until_ready()


def _in_parts(array: jax.Array, sharding: NamedSharding) -> bool:
    """Return whether to reshard a large array by parts of its first dimension, which neither layout shards."""
    unsharded = array.ndim > 1 and not any((*of.spec, None)[0] for of in (array.sharding, sharding))
    return unsharded and array.nbytes >= LARGE_BYTES


def _laid(array: jax.Array, part: NamedSharding | None) -> jax.Array:
    """Return the array under jit, which reshards it; `part`: the sharding of each part of the first dimension."""
    array = jax.device_put(array, jax.memory.Space.Device)
    if part is None:
        return array
    return jax.lax.map(lambda one: jax.lax.with_sharding_constraint(one, part), array)


def _overlap_size(one: tuple[slice, ...], other: tuple[slice, ...], shape: tuple[int, ...]) -> int:
    """Return the number of elements that two index ranges of an array share."""
    bounds = (zip(a.indices(size), b.indices(size), strict=True) for a, b, size in zip(one, other, shape, strict=True))
    return math.prod(max(0, min(ends) - max(starts)) for starts, ends, _ in bounds)
