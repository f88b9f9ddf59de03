# SPDX-License-Identifier: Apache-2.0
"""Copies that differ in a single bit are found and named; equal ones pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cluster.hub import RunError
from configs.base import MESH_AXES
from parallelism.mesh import make_mesh, mesh_context
from training import replicas

SHAPE = (8, 6)


def mesh():
    return make_mesh(dict(zip(MESH_AXES, (1, 2, 4, 1, 1, 1), strict=True)))


def state(changed=lambda shard, device: shard) -> dict:
    """Return an array split over fsdp, in two copies over data, and a count; `changed` of each device's shard."""
    whole = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    sharding = NamedSharding(mesh(), PartitionSpec("fsdp"))
    shards = [
        jax.device_put(changed(whole[index].copy(), device), device)
        for device, index in sharding.addressable_devices_indices_map(SHAPE).items()
    ]
    weight = jax.make_array_from_single_device_arrays(SHAPE, sharding, shards)
    step = jax.device_put(np.int32(7), NamedSharding(mesh(), PartitionSpec()))
    return {"params": {"mlp": weight}, "step": step}


def check(state) -> None:
    with mesh_context(mesh()):
        replicas.check(state, mesh())


def test_equal_copies_pass():
    check(state())


@pytest.mark.parametrize("dtype", [bool, jnp.bfloat16, np.int32])
def test_arrays_of_any_width_are_compared(dtype):
    """A carry has latents in the compute type, and says of each slot whether it has halted."""
    sharding = NamedSharding(mesh(), PartitionSpec())
    whole = np.array([1, 0, 1, 1], dtype)

    def copies(other: np.ndarray) -> dict:
        shards = [jax.device_put(other if device.id == 5 else whole, device) for device in mesh().devices.flat]
        return {"halted": jax.make_array_from_single_device_arrays(whole.shape, sharding, shards)}

    check(copies(whole))
    with pytest.raises(RunError, match=r"halted is not the same on device 0 .* and on device 5"):
        check(copies(whole[::-1].copy()))


@pytest.mark.parametrize("place", [(0, 0), (1, 5)])
def test_one_flipped_bit_is_named_with_both_holders(place):
    def flip(shard, device):
        if device.id == 6:
            shard.view(np.uint32)[place] ^= 1
        return shard

    with pytest.raises(RunError, match=r"params\.mlp is not the same on device 2 .* and on device 6"):
        check(state(flip))


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "uint32"])
def test_copies_of_every_type_that_a_state_has_are_compared(dtype):
    sharding = NamedSharding(mesh(), PartitionSpec())
    copies = [np.zeros(SHAPE, jax.numpy.dtype(dtype)) for _ in range(8)]
    copies[5][1, 2] = 1

    def laid(arrays):
        placed = [jax.device_put(array, device) for array, device in zip(arrays, jax.devices(), strict=True)]
        return {"carry": jax.make_array_from_single_device_arrays(SHAPE, sharding, placed)}

    check(laid(copies[:1] * 8))
    with pytest.raises(RunError, match=r"carry is not the same on device 0 .* and on device 5"):
        check(laid(copies))


def test_swapped_values_are_found():
    """A sum alone would not see them."""

    def swap(shard, device):
        return shard[:, ::-1].copy() if device.id == 3 else shard

    with pytest.raises(RunError, match="device 3 of process 0 and on device 7"):
        check(state(swap))
