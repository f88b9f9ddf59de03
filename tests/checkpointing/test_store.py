# SPDX-License-Identifier: Apache-2.0
"""Another checkpoint store is a class, passed to train(): here each process keeps its shards in a folder of its own.

The test runs this file as each of two processes.
"""

import hashlib
import json
import os
import pathlib
import re
import shutil
import sys

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from checkpointing.checkpoints import Checkpoints  # noqa: E402
from checkpointing.retention import Retention  # noqa: E402
from checkpointing.store import CheckpointError  # noqa: E402
from cluster import processes, startup  # noqa: E402
from cluster.group import find_group  # noqa: E402

STEPS = 4


class PerProcessFolders:
    """A `Store`: <root>/host-<index>/<step> has the shards of one process, as plain NumPy files, and the record."""

    is_shared, failures = False, (OSError,)

    def __init__(self, root: pathlib.Path):
        self.place = root / f"host-{processes.index()}"
        self.shards: dict[str, np.ndarray] = {}

    def steps(self) -> list[int]:
        return sorted(int(name) for name in self.existing() if name.isdecimal())

    def existing(self) -> list[str]:
        return [path.name for path in self.place.glob("[0-9]*") if path.suffix != ".unfinished"]

    def others(self) -> dict[str, str]:
        return {path.name: "not a checkpoint" for path in self.place.glob("*.*")}

    def problems(self, step: int, parts=()) -> list[str]:
        folder = self.place / str(step)
        facts = json.loads((folder / "facts.json").read_text())
        found = {name: _facts((folder / name).read_bytes()) for name in facts if (folder / name).exists()}
        return [f"{self.place.name}/{name} is damaged" for name in facts if facts[name] != found.get(name)]

    def part(self, step: int) -> None:
        return None  # it does not know the others

    def record(self, step: int) -> dict:
        return json.loads((self.place / str(step) / "record.json").read_text())

    def arrays(self, step: int) -> dict[str, dict[str, list]]:
        found: dict[str, dict[str, list]] = {}
        for file, facts in json.loads((self.place / str(step) / "facts.json").read_text()).items():
            if file.endswith(".npy"):
                found.setdefault(file.partition("@")[0], {})[file] = facts
        return found

    def restore(self, step: int, arrays: dict, replica_axis: int | None = None) -> dict:
        def read(path, leaf):
            return jax.make_array_from_callback(
                leaf.shape,
                leaf.sharding,
                lambda index: np.load(self.place / str(step) / _file(path, index, leaf.shape)),
            )

        return jax.tree_util.tree_map_with_path(read, arrays)

    def open(self, writer: str) -> None:
        self.writer = writer

    def begin(self, step: int, arrays: dict) -> None:
        leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
        self.shards = {
            _file(path, shard.index, leaf.shape): np.array(shard.data)
            for path, leaf in leaves
            for shard in leaf.addressable_shards
        }

    def write(self, step: int, record: str) -> None:
        folder = self._unfinished(step)
        folder.mkdir(parents=True)
        for name, values in self.shards.items():
            np.save(folder / name, values)
        (folder / "record.json").write_text(record)

    def describe(self, step: int) -> None:
        folder = self._unfinished(step)
        facts = {path.name: _facts(path.read_bytes()) for path in folder.iterdir()}
        (folder / "facts.json").write_text(json.dumps(facts))

    def join(self, step: int, parts: list) -> None:
        pass  # the parts stay apart

    def commit(self, step: int, parts: list) -> None:
        self._unfinished(step).rename(self.place / str(step))

    def discard(self, step: int) -> None:
        for folder in (self._unfinished(step), self.place / str(step)):
            shutil.rmtree(folder, ignore_errors=True)

    def move_aside(self, step: int) -> str:
        (self.place / str(step)).rename(self.place / f"{step}.damaged")
        return f"set aside as {step}.damaged"

    def remove(self, step: int) -> None:
        (self.place / str(step)).rename(self._unfinished(step))
        self.clear()

    def clear(self) -> None:
        for folder in self.place.glob("*.unfinished"):
            shutil.rmtree(folder)

    def _unfinished(self, step: int) -> pathlib.Path:
        return self.place / f"{step}-{self.writer}.unfinished"


def _file(path: tuple, index: tuple, shape: tuple) -> str:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    bounds = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return f"{name}@{','.join(f'{first}-{last}' for first, last, _ in bounds)}.npy"


def _facts(content: bytes) -> list:
    return [len(content), hashlib.sha256(content).hexdigest()]


def train_twice(place: pathlib.Path) -> dict:
    """Train, take the last checkpoint away, resume, and lose parts of process 1; return what came of it.

    Each process has its own workdir too, as on hosts that share no storage.
    """
    import train
    from tests.test_train import in_process, own_batches

    root, workdir = place / "disks", place / f"workdir-{processes.index()}"
    config = in_process(train__steps=STEPS, train__save_every=2, model__dtype="float32", evaluation__sample_tokens=0)
    config.model.max_length = config.train.sequence_length = 16

    def run() -> dict[str, str]:
        start = max(PerProcessFolders(root).steps(), default=0)
        batches = list(own_batches(config, STEPS))[start:]
        result = train.train(config, workdir, iter(batches), store=PerProcessFolders(root))
        folder = root / f"host-{processes.index()}" / str(STEPS)
        assert result.checkpoint == str(folder)
        return {path.name: _facts(path.read_bytes())[1] for path in folder.glob("*.npy")}

    first = run()
    shutil.rmtree(PerProcessFolders(root).place / str(STEPS))
    again, told, refused = run(), [], ""
    lose(root, str(STEPS))
    with Checkpoints(workdir, Retention(newest=2), store=PerProcessFolders(root)) as checkpoints:
        checkpoints.report = lambda text, **figures: told.append(text)
        older = checkpoints.newest()
    lose(root, "")
    try:
        run()
    except CheckpointError as error:
        refused = str(error)
    return {"files": len(first), "same": first == again, "older": older, "told": told, "refused": refused}


def lose(root: pathlib.Path, name: str) -> None:
    """Delete a part of the folder of process 1, while no process uses it."""
    processes.gather("before", True)
    if processes.index() == 1:
        shutil.rmtree(PerProcessFolders(root).place / name)
    processes.gather("after", True)


@pytest.mark.slow
def test_without_shared_storage_a_run_resumes_bit_for_bit_and_names_the_process_whose_parts_are_missing(tmp_path):
    from tests import groups

    try:
        started = groups.start([__file__, str(tmp_path)], count=2, devices=2, cache=tmp_path / "cache")
        ended = groups.finish(started)
    finally:
        groups.end_all()
    assert [status for status, _, _ in ended] == [0, 0], ended
    for _, out, _ in ended:
        came = json.loads(out.strip().splitlines()[-1])
        assert came["same"] and came["files"] > 20
        assert came["older"] == 2  # the newest that both have
        assert re.fullmatch(
            r"checkpoint 4 is damaged: process 1 \(\S+\) has no part of it; set aside as .*", came["told"][0]
        )
        assert re.fullmatch(r"\S+: process 1 \(\S+\) has no part of checkpoint 2, and no older one .*", came["refused"])


if __name__ == "__main__":
    startup.choose_platform(None, "cpu", pathlib.Path(os.environ["XDG_CACHE_HOME"]))
    processes.start(find_group(os.environ, "cpu", 60), 60, lambda line, status: sys.exit(line))
    print(json.dumps(train_twice(pathlib.Path(sys.argv[1]))))
    processes.leave()
