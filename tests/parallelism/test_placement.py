# SPDX-License-Identifier: Apache-2.0
"""Which rows a process reads, and that they arrive where they belong."""

import json
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

from configs.base import MESH_AXES
from parallelism.axis_rules import batch_sharding
from parallelism.mesh import make_mesh
from parallelism.placement import local_rows, local_values, place
from tests.support import ROOT, free_port

ROWS, LENGTH = 8, 12


@pytest.mark.parametrize("sizes", [(8, 1, 1, 1, 1), (2, 2, 1, 2, 1), (1, 4, 2, 1, 1), (1, 1, 4, 1, 2)])
def test_one_process_reads_every_row_once_and_places_it_whole(sizes):
    sharding = batch_sharding(make_mesh(dict(zip(MESH_AXES[1:], sizes, strict=True))))
    np.testing.assert_array_equal(local_rows(sharding, ROWS), np.arange(ROWS))
    batches = [{"tokens": np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) + 1000 * n} for n in range(3)]
    for placed, given in zip(place(batches, sharding, ROWS), batches, strict=True):
        assert placed["tokens"].sharding == sharding
        np.testing.assert_array_equal(jax.device_get(placed["tokens"]), given["tokens"])
        shard = placed["tokens"].addressable_shards[0].data.shape
        assert shard == (ROWS // (sizes[0] * sizes[1] * sizes[3]), LENGTH // sizes[2])


def test_the_next_batch_comes_onto_the_devices_while_a_step_takes_its_time(monkeypatch):
    sharding, put = batch_sharding(make_mesh(dict(zip(MESH_AXES[1:], (8, 1, 1, 1, 1), strict=True)))), []
    array = jax.make_array_from_callback

    def counting(*arguments):
        put.append(array(*arguments))
        return put[-1]

    monkeypatch.setattr(jax, "make_array_from_callback", counting)
    batches = place(({"tokens": np.full((ROWS, LENGTH), n)} for n in range(4)), sharding, ROWS)
    assert len(put) == 1
    for step in range(4):
        batch = next(batches)  # which step `step` is about to take
        assert jax.device_get(batch["tokens"])[0, 0] == step
        until = time.monotonic() + 10
        while len(put) < min(step + 2, 4) and time.monotonic() < until:
            time.sleep(0.001)
        assert len(put) == min(step + 2, 4)
    assert next(batches, None) is None


def test_what_fails_while_a_batch_is_read_ahead_is_raised_where_it_is_asked_for():
    def read():
        yield {"tokens": np.zeros((ROWS, LENGTH))}
        raise OSError("a shard is gone")

    batches = place(read(), batch_sharding(make_mesh(dict.fromkeys(MESH_AXES[1:], 1), jax.devices()[:1])), ROWS)
    assert next(batches)["tokens"].shape == (ROWS, LENGTH)
    with pytest.raises(OSError, match="a shard is gone"):
        next(batches)


PROCESS = """
import json, os, sys
index, port = int(sys.argv[1]), sys.argv[2]
os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=4")
import jax
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
import numpy as np
from parallelism.axis_rules import batch_sharding
from parallelism.mesh import make_mesh
from parallelism.placement import local_rows, place

answers = []
for sizes in [(8, 1, 1, 1, 1), (1, 2, 4, 1, 1), (1, 1, 8, 1, 1)]:
    sharding = batch_sharding(make_mesh(dict(zip(("data", "fsdp", "context", "expert", "model"), sizes))))
    rows = local_rows(sharding, 8)
    whole = np.arange(8 * 16).reshape(8, 16)
    placed = next(place([{"tokens": whole[rows]}], sharding, 8))["tokens"]
    right = all(np.array_equal(shard.data, whole[shard.index]) for shard in placed.addressable_shards)
    answers.append([rows.tolist(), placed.shape == (8, 16) and right])
print(json.dumps(answers))
"""


@pytest.mark.slow
def test_two_processes_read_only_what_their_devices_hold():
    """Split by rows, each reads half of them; where the length is split between processes, both read every row."""
    port = str(free_port())
    processes = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(index), port], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for index in range(2)
    ]
    first, second = (json.loads(process.communicate(timeout=120)[0]) for process in processes)
    halves, everything = ([0, 1, 2, 3], [4, 5, 6, 7]), [*range(8)]
    assert first == [[halves[0], True], [halves[0], True], [everything, True]]
    assert second == [[halves[1], True], [halves[1], True], [everything, True]]


def test_rows_that_several_processes_hold_count_in_one_of_them():
    """Else the vote of a puzzle would count once for each process that shares its row."""
    shards = [
        types.SimpleNamespace(index=(slice(start, start + 2),), replica_id=replica, data=np.arange(start, start + 2))
        for start, replica in ((4, 0), (2, 1), (0, 0))
    ]  # fmt: skip
    array = types.SimpleNamespace(addressable_shards=shards, shape=(6,), dtype=np.int32)
    np.testing.assert_array_equal(local_values(array), [0, 1, 4, 5])
    others = types.SimpleNamespace(addressable_shards=shards[1:2], shape=(6, 3), dtype=np.int32)
    assert local_values(others).shape == (0, 3)
