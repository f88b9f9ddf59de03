# SPDX-License-Identifier: Apache-2.0
"""Detect silent corruption: replicas of a state, and two runs of the same step, must agree bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from cluster import processes
from cluster.hub import RunError
from training.offload import on_device
from training.state import named_leaves


def check(state, mesh: jax.sharding.Mesh) -> None:
    """Compare checksums of all replicas of every shard of every array, over all processes.

    Devices compute the checksums in unsigned integers over bits and positions; only checksums leave a device. Raises
    RunError with the array and two of its devices if they differ.
    """
    if mesh.size == 1:
        return
    seen: dict[tuple[str, str], tuple[int, str]] = {}
    for number, of_process in enumerate(processes.gather("replicas", checksums(state, mesh))):
        for key, checksum in of_process.items():
            name, part, device = key.split("|")
            holder = f"device {device} of {processes.name(number)}"
            first, first_holder = seen.setdefault((name, part), (checksum, holder))
            if checksum != first:
                raise RunError(
                    f"{name} is not the same on {first_holder} and on {holder}, which should hold equal copies; "
                    "restore again, with --config.checkpoint.restore=broadcast where the hosts read different files"
                )


def checksums(state, mesh: jax.sharding.Mesh) -> dict[str, int]:
    """Return {"name|part|device": checksum} of every shard of every array that this process holds."""
    leaves = named_leaves(state)
    specs = tuple(leaf.sharding.spec for _, leaf in leaves)
    sums = _checksums(mesh, specs)(*(leaf for _, leaf in leaves))
    mine = {}
    for (name, leaf), checksum in zip(leaves, sums, strict=True):
        parts = leaf.sharding.devices_indices_map(leaf.shape)
        for shard in checksum.addressable_shards:
            part = str(parts[shard.device])
            mine[f"{name}|{part}|{shard.device.id}"] = int(np.asarray(shard.data)[0])
    return mine


def run_twice(train_step, state, batch, mesh: jax.sharding.Mesh):
    """Run train_step(state, batch) twice and return its result; needs memory for a second state.

    Raises RunError with names if the results differ on a device, or if replicas differ.
    """
    copy = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding, may_alias=False), state)
    first, _ = train_step(copy, batch)
    sums = checksums(first, mesh)
    del first
    state, scalars = train_step(state, batch)
    again = checksums(state, mesh)
    mine = sorted(key for key in sums if sums[key] != again[key])
    for number, differing in enumerate(processes.gather("recheck", mine)):
        if differing:
            name, _, device = differing[0].split("|")
            raise RunError(
                f"step {int(state.step)} gave different bits when computed twice, on device {device} of "
                f"{processes.name(number)}, in {len(differing)} arrays, {name} among them; take that device out of "
                "use, and start again from the last checkpoint"
            )
    check(state, mesh)
    return state, scalars


@functools.cache
def _checksums(mesh: jax.sharding.Mesh, specs: tuple):
    """Return a function of arrays to uint32 [devices of the mesh] each, the checksum of every device's shard."""

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(mesh.axis_names), check_vma=False
    )
    def of_shards(*shards):
        return tuple(_checksum(shard)[None] for shard in shards)

    layout = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.jit(lambda *arrays: of_shards(*on_device(arrays)), out_shardings=layout)


def _checksum(array: jax.Array) -> jax.Array:
    """Return the sum of bits * hash of the position, modulo 2^32, of an array with values of up to 32 bits."""
    numbers = array.astype(jnp.uint8) if array.dtype == bool else array
    unsigned = jnp.dtype(f"uint{8 * numbers.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(numbers, unsigned).astype(jnp.uint32).ravel()
    places = jax.lax.iota(jnp.uint32, bits.size)
    return jnp.sum(bits * (2 * places + 1) * (places ^ jnp.uint32(0x9E3779B9) | 1), dtype=jnp.uint32)
