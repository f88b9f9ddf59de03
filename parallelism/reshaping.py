# SPDX-License-Identifier: Apache-2.0
"""Moves live arrays from their mesh to another one of the same devices, without a file and without the host."""

import math

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# From this size on layers are moved one by one: between some layouts the TPU compiler gathers all that it is given, as
# from fsdp=16 to data=2, fsdp=4, model=2, and on the way back twice.
LARGE_BYTES = 2**26


def reshape(tree, layouts):
    """Return the arrays of `tree` as `layouts` says; the old ones are deleted.

    One array is moved after the other, and its old shards freed before the next one's turn. So beside the state a
    device holds the new shards of one array at most, twice where devices change their order, and what the compiler
    gathers to make them, of stacked layers one or two. No value changes. In several processes each calls it, with the
    same trees: `tree` of arrays with NamedShardings, any types, not used again; `layouts` like it, of anything with a
    `sharding` on a mesh of the same devices, in any order.
    """
    return jax.tree.map(lambda array, layout: _moved(array, layout.sharding), tree, layouts)


def bytes_moved(tree, layouts) -> tuple[int, int]:
    """Return the bytes that are new to the device that gets most, and to all: of their shards what they held not yet.

    It is the least that can be sent; the compiler may send more. `tree` may be of shapes with a `sharding`.
    """
    sent: dict[jax.Device, int] = {}
    for array, layout in zip(jax.tree.leaves(tree), jax.tree.leaves(layouts), strict=True):
        before, after = (of.sharding.devices_indices_map(array.shape) for of in (array, layout))
        for device, new in after.items():
            missing = _numbers(new, new, array.shape) - _numbers(before[device], new, array.shape)
            sent[device] = sent.get(device, 0) + missing * array.dtype.itemsize
    return max(sent.values(), default=0), sum(sent.values())


def _moved(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    if array.sharding == sharding:
        return array
    # First to the new shape of the mesh on devices in the old order, which jit leaves as it is; what is left is whole
    # shards that change places, where there is another order.
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
    """Whether a large array can be moved part by part along its first dimension, which neither layout splits."""
    whole = array.ndim > 1 and not any((*of.spec, None)[0] for of in (array.sharding, sharding))
    return whole and array.nbytes >= LARGE_BYTES


def _laid(array: jax.Array, part: NamedSharding | None) -> jax.Array:
    """Return the array, for jit to lay out; `part`: how each part along the first dimension will lie."""
    array = jax.device_put(array, jax.memory.Space.Device)
    if part is None:
        return array
    return jax.lax.map(lambda one: jax.lax.with_sharding_constraint(one, part), array)


def _numbers(one: tuple[slice, ...], other: tuple[slice, ...], shape: tuple[int, ...]) -> int:
    """Return how many numbers of an array two parts of it have in common."""
    bounds = (zip(a.indices(size), b.indices(size), strict=True) for a, b, size in zip(one, other, shape, strict=True))
    return math.prod(max(0, min(ends) - max(starts)) for starts, ends, _ in bounds)
