# SPDX-License-Identifier: Apache-2.0
"""The parts that processes without shared storage keep: whose they are, and what becomes of them.

The test runs this file as each of two processes, which save arrays and restore them with folders swapped or mixed.
"""

import json
import os
import pathlib
import re
import shutil
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from checkpointing import host_parts, manifest  # noqa: E402
from checkpointing import workdir as workdirs  # noqa: E402
from checkpointing.checkpoints import Checkpoints  # noqa: E402
from checkpointing.host_folders import HostFolders  # noqa: E402
from checkpointing.retention import Retention  # noqa: E402
from checkpointing.store import CheckpointError  # noqa: E402
from cluster import processes, startup  # noqa: E402
from cluster.group import find_group  # noqa: E402


def arrays_of(step: int) -> dict:
    """Return an array that two processes share in halves, and one that both have whole."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("host", "chip"))
    values = np.arange(64, dtype=np.float32).reshape(8, 8) + step
    shardings = {"halves": PartitionSpec("host", "chip"), "whole": PartitionSpec(None, "chip")}

    def put(spec: PartitionSpec) -> jax.Array:
        return jax.make_array_from_callback((8, 8), NamedSharding(mesh, spec), lambda index: values[index])

    return {name: put(spec) for name, spec in shardings.items()}


def opened(place: pathlib.Path, owner: int, **how) -> Checkpoints:
    workdir = place / f"host-{owner}"
    return Checkpoints(workdir, Retention(newest=9), store=HostFolders(workdir), **how)


def refusal(action) -> str:
    """Return the message of the CheckpointError that an action raises in this process; "" if it raises none."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return ""


def keep_and_mix(place: pathlib.Path) -> dict:
    """Return what came of parts that are in their place, in each other's, of two saves, and alone."""
    own, other = processes.index(), 1 - processes.index()
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), arrays_of(0))
    with opened(place, own) as checkpoints:
        for step in (1, 2):
            checkpoints.save_at_once(step, arrays_of(step), {"step": step, "process": own})
        halves = checkpoints.store.place / "2" / "state" / "halves"
    came = {"files": sorted(path.name for path in halves.glob("[0-9]*"))}
    with opened(place, other) as checkpoints:  # the numbers of the processes have changed
        came["newest"] = checkpoints.newest()
        came["whole"] = _restored(checkpoints, {"whole": abstract["whole"]})
        came["halves"] = refusal(lambda: checkpoints.store.restore(2, {"halves": abstract["halves"]}))
    processes.gather("swapped", True)
    if own == 1:  # it was killed before it could commit a second save of step 2
        shutil.copytree(place / "host-1", place / "kept-1")
    with opened(place, own) as checkpoints:
        checkpoints.save_at_once(2, arrays_of(7), {"step": 2})
    if own == 1:
        shutil.rmtree(place / "host-1")
        shutil.move(place / "kept-1", place / "host-1")
    processes.gather("mixed", True)
    told = []
    with opened(place, own) as checkpoints:
        checkpoints.report = lambda text, **figures: told.append(text)
        came["older"] = checkpoints.newest()
    came["told"] = told
    came["shared"] = refusal(lambda: workdirs.exclusive(place, per_host=True).__enter__())
    return came


def _restored(checkpoints: Checkpoints, abstract: dict) -> float:
    """Return the first number of an array that both processes have whole."""
    arrays = checkpoints.store.restore(2, abstract)
    return float(arrays["whole"].addressable_shards[0].data[0, 0])


def test_a_part_is_found_by_what_it_says_and_parts_of_different_saves_are_not_mixed(tmp_path):
    from tests import groups

    try:
        ended = groups.finish(groups.start([__file__, str(tmp_path)], count=2, devices=4, cache=tmp_path / "cache"))
    finally:
        groups.end_all()
    assert [status for status, _, _ in ended] == [0, 0], ended
    for number, (_, out, _) in enumerate(ended):
        came = json.loads(out.strip().splitlines()[-1])
        assert came["files"] == [f"{number}.0", f"{number}.1"]
        assert (came["newest"], came["whole"]) == (2, 2.0)
        needed = rf"process {number} \(\S+\) needs state/halves/{number}.0 of checkpoint 2, .*"
        assert re.match(
            rf"{needed} the part here is that of process {1 - number} \(\S+\), whose number", came["halves"]
        )
        assert came["older"] == 1 and "its parts are of different saves; set aside as 2.damaged" in came["told"][0]
        assert "several processes share --workdir" in came["shared"]


@pytest.fixture
def alone(tmp_path) -> HostFolders:
    """A store with step 3 of the only process of a run."""
    store = HostFolders(tmp_path / "run")
    with Checkpoints(tmp_path / "run", Retention(newest=9), store=store) as checkpoints:
        checkpoints.save_at_once(3, {"params": {"weight": jax.numpy.arange(4.0)}}, {"step": 3})
    return store


def test_the_part_of_the_only_process_is_a_complete_checkpoint(alone, tmp_path):
    assert alone.part(3) is None
    with Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.newest() == 3


def test_a_backup_that_is_interrupted_keeps_the_checkpoint_of_the_earlier_one(alone, tmp_path, monkeypatch):
    shutil.copytree(tmp_path / "run", tmp_path / "host")
    host_parts.join([tmp_path / "host"], tmp_path / "backup")
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    monkeypatch.setattr(shutil, "rmtree", _interrupted_in_the_middle)
    with pytest.raises(KeyboardInterrupt):
        host_parts.join([tmp_path / "again"], tmp_path / "backup")
    assert manifest.problems(tmp_path / "backup" / "checkpoints" / "3") == []


def _interrupted_in_the_middle(folder: pathlib.Path, **options) -> None:
    if folder.exists():
        next(folder.rglob("manifest.json")).unlink()
        raise KeyboardInterrupt


def test_files_that_vanish_while_they_are_saved_make_no_checkpoint(alone):
    arrays = {"params": {"weight": jax.numpy.arange(4.0)}}
    alone.begin(4, arrays)
    alone.write(4, "{}")
    next(alone.place.glob("4-*.unfinished/state/params.weight/0")).unlink()
    with pytest.raises(OSError, match=r"params.weight/0 is missing; it was deleted meanwhile"):
        alone.join(4, [alone.describe(4)])
    alone.discard(4)
    assert alone.steps() == [3] and sorted(alone.names()) == ["3"]


def test_a_failed_save_is_discarded_even_after_its_commit(alone):
    alone.begin(4, {"params": {"weight": jax.numpy.arange(4.0)}})
    alone.write(4, "{}")
    parts = [alone.describe(4)]
    alone.join(4, parts)
    alone.commit(4, parts)
    assert alone.steps() == [3, 4]
    alone.discard(4)
    assert alone.steps() == [3]


def test_the_files_of_a_part_of_an_array(tmp_path):
    (tmp_path / ".zarray").write_text(json.dumps({"shape": [8, 6], "chunks": [4, 2]}))
    everything = [f"{row}.{column}" for row in (0, 1) for column in (0, 1, 2)]
    assert host_parts.chunk_files(tmp_path, ".zarray") == everything
    assert host_parts.chunk_files(tmp_path, ".zarray", [slice(4, 8), slice(1, 4)]) == ["1.0", "1.1"]
    assert host_parts.chunk_files(tmp_path, ".zarray", [slice(None), slice(4, None)]) == ["0.2", "1.2"]
    part_of_a_file = [slice(0, 2), slice(2, 3)]  # as on a finer mesh than the one that saved it
    assert host_parts.chunk_files(tmp_path, ".zarray", part_of_a_file) == ["0.1"]


def part_of(place: pathlib.Path, number: int, save: str = "save", chunks: tuple[int, ...] = (0, 1)) -> pathlib.Path:
    """Return the folder of a host with its part of checkpoint 2, an array in two files; both hosts have a record."""
    part = place / f"host-{number}" / "checkpoints" / "2"
    whose = host_parts.Part(save=save, process=number, holders=["process 0", "process 1"])
    files = {
        "record.json": str(number), host_parts.PART: json.dumps(whose),
        "state/weight/.zarray": json.dumps({"shape": [4], "chunks": [2]}),
    }  # fmt: skip
    for name, content in (files | {f"state/weight/{chunk}": str(chunk) for chunk in chunks if chunk == number}).items():
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        (part / name).write_text(content)
    manifest.write(part, 2, manifest.digests(part, manifest.files_below(part)))
    return place / f"host-{number}"


def test_joined_parts_have_all_files_and_the_record_of_process_0_whatever_the_order_of_hosts(tmp_path):
    hosts = [part_of(tmp_path, number) for number in (1, 0)]
    assert host_parts.join(hosts, tmp_path / "backup") == ([2], [])
    joined = tmp_path / "backup" / "checkpoints" / "2"
    assert manifest.problems(joined) == [] and (joined / "record.json").read_text() == "0"
    assert sorted(path.name for path in (joined / "state" / "weight").iterdir()) == [".zarray", "0", "1"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"save": "other"}, "the hosts have parts of different saves"),
        ({"chunks": (0,)}, "no part has state/weight/1"),
        (None, "no host has the part of process 1"),
    ],
)
def test_parts_that_make_no_checkpoint_are_not_joined(tmp_path, changes, why):
    hosts = [part_of(tmp_path, 0), *([] if changes is None else [part_of(tmp_path, 1, **changes)])]
    joined, (left_out,) = host_parts.join(hosts, tmp_path / "backup")
    assert joined == [] and left_out == f"checkpoint 2 is left out: {why}"


if __name__ == "__main__":
    startup.choose_platform(None, "cpu", pathlib.Path(os.environ["XDG_CACHE_HOME"]))
    processes.start(find_group(os.environ, "cpu", 60), 60, lambda line, status: sys.exit(line))
    print(json.dumps(keep_and_mix(pathlib.Path(sys.argv[1]))))
    processes.leave()
