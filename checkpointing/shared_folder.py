# SPDX-License-Identifier: Apache-2.0
"""The usual checkpoint store: a folder `checkpoints` that all processes share, local or in a bucket.

A checkpoint is a folder with its step as the name: the arrays in Orbax's format (`state`), the record, and a manifest
with the digest of every file. Each process writes its shards to a folder of its own. Then each moves its files to the
common folder, and process 0 adds the manifest and names the folder last.
"""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Callable

import jax
import orbax.checkpoint as ocp
from tensorstore import TensorStore

from checkpointing import array_files, manifest, orbax_arrays
from checkpointing.bucket import copy_name
from checkpointing.folder import UNFINISHED, CheckpointFolder
from checkpointing.record import MAX_BYTES as RECORD_BYTES
from checkpointing.record import Record
from checkpointing.store import CheckpointError
from cluster import processes
from cluster.hub import RunError
from files.json_reader import parse_json
from settings.stored_config import check_types

STATE, RECORD, ZARRAY = "state", "record.json", ".zarray"
DAMAGED = ".damaged"
Files = dict[str, list]  # {file below a checkpoint's folder: [bytes, SHA-256]}


class SharedFolder(CheckpointFolder):
    """A `Store`: the folder `checkpoints` of a workdir.

    checkpointing/store.py documents its methods. A docstring here says what is special about this store.
    """

    is_shared = True

    def __init__(self, workdir, staging: pathlib.Path | None = None):
        """Open the folder of a workdir, which is a path or the address of a bucket folder.

        Args:
          staging: local folder to which checkpoints are saved before they are copied; a bucket needs one.

        Raises CheckpointError if there is a file in place of the folder.
        """
        super().__init__(workdir)
        # The staging folder has a folder for each process of each run.
        own = f"{copy_name(str(self.place.parent))}/process_{processes.index()}"
        self.staging = staging and pathlib.Path(staging).expanduser().absolute() / own
        self.writer = ""
        # These belong to the present save.
        self.writing: ocp.AsyncCheckpointer | None = None
        self.num_arrays, self.chunks = 0, {}
        if self.is_local and self.place.exists() and not self.place.is_dir():
            raise CheckpointError(f"{self.place} is not a folder; move it away, or name another --workdir")

    def existing(self) -> list[str]:
        folders = [path.name for path in self.place.iterdir() if path.is_dir()] if self.place.exists() else []
        return sorted(name for name in folders if not name.startswith(".") and not name.endswith(UNFINISHED))

    def others(self) -> dict[str, str]:
        kinds = {
            DAMAGED: "set aside as damaged",
            UNFINISHED: "an unfinished save or deletion; the next start clears it",
        }
        return {name: what for name in sorted(self.names()) for kind, what in kinds.items() if kind in name}

    def move_aside(self, step: int) -> str:
        taken = self.names()
        names = (f"{step}{DAMAGED}{number}" for number in ("", *range(2, 1000)))
        name = next(name for name in names if name not in taken)
        try:
            (self.place / str(step)).rename(self.place / name)
        except self.failures as error:
            return f"it could not be set aside ({error})"
        return f"set aside as {name}"

    def open(self, writer: str) -> None:
        self.writer = writer

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
        names = sorted(str(path.relative_to(own)) for path in own.rglob("*") if path.is_file())
        self.chunks = {name: array_files.chunks(own / name) for name in names if name.endswith(f"/{ZARRAY}")}
        return manifest.digests(own, names)

    def join(self, step: int, parts: list[Files]) -> None:
        """Move this process's files to the common folder; copies from staging are read back and verified."""
        own, landing = self._own(step), self._landing(step)
        _, files = _shared_out(parts)
        for name in files:
            (landing / name).parent.mkdir(parents=True, exist_ok=True)
            if not self.staging:
                os.replace(own / name, landing / name)
                continue
            with (own / name).open("rb") as source, (landing / name).open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 24)
        if self.staging and manifest.digests(landing, list(files)) != files:
            raise OSError(f"a copy below {landing} differs from its source")
        if self.is_local:
            for name in files:
                _sync(landing / name)
        shutil.rmtree(own)

    def commit(self, step: int, parts: list[Files]) -> None:
        """In process 0, add the manifest and give the folder its name; OSError if files of its arrays are missing."""
        if processes.index() != 0:
            return
        files, _ = _shared_out(parts)
        landing, checkpoint = self._landing(step), self.place / str(step)
        self._check_arrays(files)
        manifest.write(landing, step, files)
        if not self.is_local:
            self._mark(step).unlink()
            return
        for path in {landing / manifest.NAME, landing} | {(landing / name).parent for name in files}:
            _sync(path)
        if checkpoint.exists():  # left by a save that failed after this rename
            self.move_aside(step)
        landing.rename(checkpoint)
        _sync(self.place)

    def _check_arrays(self, files: Files) -> None:
        """Raise OSError if files of arrays are missing because they were deleted while they were written.

        A manifest of the remaining files would declare the checkpoint valid.
        """
        if len(self.chunks) < self.num_arrays:
            raise OSError(f"{len(self.chunks)} of {self.num_arrays} arrays are left; others were deleted meanwhile")
        for name, chunks in self.chunks.items():
            for chunk in chunks:
                if name.removesuffix(ZARRAY) + chunk not in files:
                    raise OSError(f"{name.removesuffix(ZARRAY)}{chunk} is missing; it was deleted meanwhile")

    def discard(self, step: int) -> None:
        shutil.rmtree(self._own(step), ignore_errors=True)
        if processes.index() == 0 and self.is_local:
            shutil.rmtree(self._landing(step), ignore_errors=True)

    def clear(self) -> None:
        if self.staging:
            shutil.rmtree(self.staging, ignore_errors=True)
        if processes.index() == 0:
            self.remove_unfinished()

    def record(self, step: int) -> Record:
        path = self.place / str(step) / RECORD
        try:
            content = path.read_bytes()
        except self.failures as error:
            raise RunError(f"{path} cannot be read now ({error}); run the command again") from None
        record = parse_json(content, Record, str(path), max_bytes=RECORD_BYTES)
        check_types(record.get("config", {}), f"{path}: config")
        return record

    def problems(self, step: int) -> list[str]:
        """Return a line for each damaged file, of those that this process checks."""
        return manifest.problems(self.place / str(step), part=processes.index(), parts=processes.count())

    def arrays(self, step: int) -> dict[str, Files]:
        found = {}
        for file, facts in self._files(step).items():
            if file.startswith(f"{STATE}/") and file.count("/") > 1:  # Orbax has files of its own beside the arrays
                found.setdefault(file.split("/")[1], {})[file] = facts
        return found

    def open_array(self, step: int, name: str) -> TensorStore:
        """Return an array of a local checkpoint, to be read in parts in a block of `check_complete`."""
        return array_files.open_array(pathlib.Path(self.place) / str(step) / STATE, name)

    def restore(self, step: int, arrays: dict, replica_axis: int | None = None) -> dict:
        with self.check_complete(step):
            return orbax_arrays.restore(self.place / str(step) / STATE, arrays, replica_axis)

    @contextlib.contextmanager
    def check_complete(self, step: int):
        """Raise RunError if files of a checkpoint disappear while the block reads it; its run may delete it.

        This replaces any exception of the block.
        """
        folder, names = self.place / str(step), sorted(self._files(step))
        try:
            yield
        finally:
            if gone := manifest.missing(folder, names[processes.index() :: processes.count()]):
                raise RunError(f"{folder} was deleted while it was read ({gone[0]} is missing); run the command again")

    def _files(self, step: int) -> Files:
        """Return the files of the manifest; RunError if it cannot be read."""
        folder = self.place / str(step)
        try:
            return manifest.read(folder)["files"]
        except self.failures as error:
            raise RunError(f"{folder}/{manifest.NAME} cannot be read now ({error}); run the command again") from None

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


def _shared_out(parts: list[Files]) -> tuple[Files, Files]:
    """Return the files of all parts, and those that this process moves; the first process owns files of equal name."""
    owners = {name: number for number, part in reversed([*enumerate(parts)]) for name in part}
    files = {name: parts[number][name] for name, number in sorted(owners.items())}
    return files, {name: facts for name, facts in files.items() if owners[name] == processes.index()}


def _sync(path) -> None:
    """Flush a file, or the entries of a folder, to disk with fsync."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
