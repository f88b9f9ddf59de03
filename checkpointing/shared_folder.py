# SPDX-License-Identifier: Apache-2.0
"""The usual checkpoint store: a folder `checkpoints` that all processes share, local or in a bucket.

Each process writes its shards to a folder of its own. Then each moves its files to the common folder, and process 0
adds the manifest and names the folder last.
"""

import collections
import concurrent.futures
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence

import jax
import numpy as np

from checkpointing import host_parts, manifest, orbax_arrays
from checkpointing.bucket import copy_name
from checkpointing.folder import UNFINISHED
from checkpointing.folder_store import RECORD, STATE, Files, FolderStore, is_in, sync
from checkpointing.store import CheckpointError
from cluster import processes
from files.paths import expanded


class SharedFolder(FolderStore):
    """A `Store`: the folder `checkpoints` of a workdir."""

    is_shared = True

    def __init__(self, workdir, staging: pathlib.Path | None = None):
        """Open the folder of a workdir, which is a path or a bucket's address; `staging` is that of `Checkpoints`."""
        super().__init__(workdir)
        # The staging folder has a folder for each process of each run.
        own = f"{copy_name(str(self.place.parent))}/process_{processes.index()}"
        self.staging = staging and expanded(staging).absolute() / own
        self.num_arrays, self.chunks = 0, {}  # of the present save

    def begin(self, step: int, arrays: dict) -> None:
        own, self.num_arrays = self._own(step), len(jax.tree.leaves(arrays))
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True)
        self.writing = orbax_arrays.begin(own / STATE, arrays)

    def write(self, step: int, record: str) -> None:
        """Wait until the arrays are written; in process 0, write the record, and in a bucket the mark."""
        orbax_arrays.finish(self.writing)
        if processes.index() == 0:
            (self._own(step) / RECORD).write_text(record)
            if not self.is_local:
                self.place.mkdir(parents=True, exist_ok=True)
                self._mark(step).write_text("")

    def describe(self, step: int) -> Files:
        """Return the digests of this process's files."""
        own = self._own(step)
        names = manifest.files_below(own)
        layouts = [name for name in names if name.endswith(f"/{host_parts.LAYOUT}")]
        self.chunks = {name: host_parts.chunk_files(own, name) for name in layouts}
        return manifest.digests(own, names)

    def join(self, step: int, parts: list[Files]) -> None:
        """Move this process's files to the common folder; copies from staging are read back and verified."""
        own, landing = self._own(step), self._landing(step)
        _, files = _shared_out(parts)
        if self.staging:
            _copy(own, landing, list(files))
            if manifest.digests(landing, list(files)) != files:
                raise OSError(f"a copy below {landing} differs from its source")
        else:
            for name in files:
                (landing / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(own / name, landing / name)
        if self.is_local:
            for name in files:
                sync(landing / name)
        shutil.rmtree(own)

    def commit(self, step: int, parts: list[Files]) -> None:
        """Add the manifest and give the folder its name, in process 0; OSError if files of its arrays are missing."""
        if processes.index() != 0:
            return
        files, _ = _shared_out(parts)
        landing = self._landing(step)
        self._check_arrays(files)
        manifest.write(landing, step, files)
        if not self.is_local:
            self._mark(step).unlink()
            return
        self.give_name(landing, step, files)

    def _check_arrays(self, files: Files) -> None:
        """Raise OSError if files of arrays are missing because they were deleted while they were written.

        A manifest of the remaining files would declare the checkpoint valid.
        """
        if len(self.chunks) < self.num_arrays:
            raise OSError(f"{len(self.chunks)} of {self.num_arrays} arrays are left; others were deleted meanwhile")
        for names in self.chunks.values():
            if lost := [name for name in names if name not in files]:
                raise OSError(f"{lost[0]} is missing; it was deleted meanwhile")

    def discard(self, step: int) -> None:
        shutil.rmtree(self._own(step), ignore_errors=True)
        if processes.index() == 0 and self.is_local:
            shutil.rmtree(self._landing(step), ignore_errors=True)

    def clear(self) -> None:
        if self.staging:
            shutil.rmtree(self.staging, ignore_errors=True)
        if processes.index() == 0:
            self.remove_unfinished()

    def problems(self, step: int, parts: Sequence[str] = ()) -> list[str]:
        """Return a line for each damaged file, of those that this process checks.

        Raises CheckpointError if it is the part of one host.
        """
        if self.is_local and (part := host_parts.read(self.place / str(step))):
            raise CheckpointError(
                f"{self.place}/{step} is one of the {len(part['holders'])} parts of a checkpoint "
                f"({part['holders'][part['process']]}); {host_parts.REMEDY}, or add --config.checkpoint.per_host=true "
                "on all hosts that hold the parts"
            )
        shares = {"part": processes.index(), "parts": processes.count()}
        return manifest.problems(self.place / str(step), **shares, is_read=is_in(parts))

    def restore(self, step: int, arrays: dict, replica_axis: int | None = None) -> dict:
        with self.check_complete(step, tuple(arrays)):
            return orbax_arrays.restore(self.place / str(step) / STATE, arrays, replica_axis)

    def _own(self, step: int) -> pathlib.Path:
        """Return the folder that this process writes its part to."""
        if self.staging:
            return self.staging / f"{step}-{self.writer}"
        return pathlib.Path(self._landing(step)) / f"process_{processes.index()}"

    def _landing(self, step: int):
        """Return the folder that combines the parts of all processes."""
        return self.place / (f"{step}-{self.writer}{UNFINISHED}" if self.is_local else str(step))


class FilledFolder(SharedFolder):
    """A folder whose arrays a function writes one at a time, for imported weights that do not fit in memory.

    The values of the arrays that are saved are not read. `fill` writes every array into a folder, by
    checkpointing/array_files.py, under its name.
    """

    def __init__(self, workdir, fill: Callable[[pathlib.Path], None]):
        super().__init__(workdir)
        self.fill = fill

    def begin(self, step: int, arrays: dict) -> None:
        super().begin(step, jax.tree.map(lambda _: jax.numpy.zeros(1), arrays))

    def write(self, step: int, record: str) -> None:
        super().write(step, record)
        self.fill(self._own(step) / STATE)


def _copy(source: pathlib.Path, target: pathlib.Path, names: list[str]) -> None:
    """Copy files to a folder, which may be in a bucket, several at once. Raises OSError if one cannot be copied."""

    def copy(name: str) -> None:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        with (source / name).open("rb") as file, (target / name).open("wb") as there:
            shutil.copyfileobj(file, there, 1 << 24)

    with concurrent.futures.ThreadPoolExecutor(manifest.THREADS) as executor:
        list(executor.map(copy, names))  # the first error is raised here, and ends the copies that have not begun


def _shared_out(parts: list[Files]) -> tuple[Files, Files]:
    """Return the files of all parts, and those that this process moves; the first process owns files of equal name."""
    owners = {name: number for number, part in reversed([*enumerate(parts)]) for name in part}
    files = {name: parts[number][name] for name, number in sorted(owners.items())}
    return files, {name: facts for name, facts in files.items() if owners[name] == processes.index()}


def check_copies_are_hosts(mesh: jax.sharding.Mesh, axis: str) -> None:
    """Raise CheckpointError if a process of several has devices of more than one replica along the axis."""
    copies = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0)
    held = collections.Counter(number for copy in copies for number in {device.process_index for device in copy.flat})
    if len(held) > 1 and (most := max(held.values())) > 1:
        raise CheckpointError(
            f"checkpoint.restore=broadcast: a process has devices of {most} copies of the model "
            f"(mesh.{axis}={mesh.shape[axis]}); use read, or a mesh whose copies are whole hosts"
        )
