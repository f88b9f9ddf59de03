# SPDX-License-Identifier: Apache-2.0
"""Run as one process of several: prints, as JSON, the rows of a batch that each process reads on some meshes, what
is said of a copy of a parameter that differs in one bit on a device of process 2, whether an array comes whole
through its moves between meshes, and whether all train on a batch that process 0 alone has in its folder."""

import os
import pathlib
import sys
import tempfile
import types

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cluster import processes, startup
from cluster.group import find_group

startup.choose_platform(None, "cpu", pathlib.Path(os.environ["XDG_CACHE_HOME"]))
processes.start(find_group(os.environ, "cpu", 60), 60, lambda line, status: sys.exit(line))

import json  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from cluster.hub import RunError  # noqa: E402
from configs.base import MESH_AXES, get_config  # noqa: E402
from core.sampling import BatchSampler  # noqa: E402
from parallelism.axis_rules import batch_sharding  # noqa: E402
from parallelism.mesh import make_mesh, mesh_context  # noqa: E402
from parallelism.placement import local_rows  # noqa: E402
from parallelism.resharding import reshard  # noqa: E402
from training import replicas  # noqa: E402

MESHES = {"fsdp": (1, 1, 8, 1, 1, 1), "data, fsdp": (1, 2, 4, 1, 1, 1), "slices": (2, 2, 2, 1, 1, 1)}
rows = {
    name: local_rows(batch_sharding(make_mesh(dict(zip(MESH_AXES, sizes, strict=True)))), 16).tolist()
    for name, sizes in MESHES.items()
}
of_processes = processes.gather("rows", rows)


def difference() -> str:
    """Return what the check says of the planted difference."""
    mesh = make_mesh(dict(zip(MESH_AXES, MESHES["data, fsdp"], strict=True)))
    whole = np.arange(32, dtype=np.float32).reshape(8, 4)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    shards = []
    for device, part in sharding.addressable_devices_indices_map(whole.shape).items():
        shard = whole[part].copy()
        shard.view(np.uint32)[0, 0] ^= device == mesh.devices.flat[4]  # the first of process 2
        shards.append(jax.device_put(shard, device))
    weight = jax.make_array_from_single_device_arrays(whole.shape, sharding, shards)
    with mesh_context(mesh):
        replicas.check({"whole": jax.device_put(np.int32(1), NamedSharding(mesh, PartitionSpec()))}, mesh)
        try:
            replicas.check({"params": weight}, mesh)
        except RunError as error:
            return str(error)
    return ""


def moved() -> bool:
    """Whether this process's parts of an array are right on each mesh that it is moved to, devices turned round too."""
    whole, right = np.arange(64, dtype=np.float32).reshape(8, 8), []
    onto = [
        NamedSharding(make_mesh({"fsdp": 8}), PartitionSpec("fsdp")),
        NamedSharding(make_mesh({"data": 2, "fsdp": 4}), PartitionSpec(None, "fsdp")),
        NamedSharding(make_mesh({"fsdp": 4, "data": 2}, jax.devices()[::-1]), PartitionSpec("data", "fsdp")),
    ]
    array = jax.make_array_from_callback(whole.shape, onto[0], lambda part: whole[part])
    for sharding in onto[1:]:
        array = reshard(array, jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=sharding))
        right += [np.array_equal(shard.data, whole[shard.index]) for shard in array.addressable_shards]
    return all(right)


def kept() -> bool:
    """Whether this process's rows are those of the batch that process 0 alone has, which was saved at step 1."""
    mesh = make_mesh(dict(zip(MESH_AXES, MESHES["fsdp"], strict=True)))
    saved, sharding = np.arange(64, dtype=np.int32).reshape(16, 4), batch_sharding(mesh)
    run = types.SimpleNamespace(
        objective=types.SimpleNamespace(steps_of_batch=2), config=get_config(),
        abstract_batch={"tokens": jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=sharding)},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:  # each process has its own
        if processes.index() == 0:
            (pathlib.Path(folder) / "rollouts").mkdir()
            np.savez(pathlib.Path(folder) / "rollouts" / "1.npz", tokens=saved)
        sampled = BatchSampler(pathlib.Path(folder)).sample(run, {}, {}, {"tokens": saved}, 2)
    shards = sampled.batch["tokens"].addressable_shards
    return all(np.array_equal(shard.data, saved[shard.index]) for shard in shards)


rows_of = {name: [part[name] for part in of_processes] for name in MESHES}
print(json.dumps({"rows": rows_of, "difference": difference(), "moved": moved(), "kept": kept()}))
processes.leave()
