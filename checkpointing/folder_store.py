# SPDX-License-Identifier: Apache-2.0
"""What stores of checkpoints in folders have in common, see checkpointing/store.py.

A checkpoint is a folder with its step as the name: the arrays in Orbax's format (`state`), the record, and a manifest
with the digest of every file.
"""

import contextlib
import os
import pathlib
from collections.abc import Callable, Sequence

import orbax.checkpoint as ocp
from tensorstore import TensorStore

from checkpointing import array_files, host_parts, manifest
from checkpointing.folder import UNFINISHED, CheckpointFolder
from checkpointing.record import MAX_BYTES as RECORD_BYTES
from checkpointing.record import Record
from checkpointing.store import CheckpointError
from cluster import processes
from cluster.hub import RunError
from files.json_reader import parse_json
from settings.stored_config import check_types

STATE, RECORD = host_parts.STATE, "record.json"
DAMAGED = ".damaged"
Files = dict[str, list]  # {file below a checkpoint's folder: [bytes, SHA-256]}


class FolderStore(CheckpointFolder):
    """The methods of a `Store` that read and rename whole checkpoints.

    checkpointing/store.py documents them. A docstring here and in subclasses says what is special about a store.
    """

    is_shared: bool

    def __init__(self, workdir):
        """Open the folder of a workdir; CheckpointError if there is a file in its place."""
        super().__init__(workdir)
        self.writer = ""
        self.writing: ocp.AsyncCheckpointer | None = None  # of the present save
        if self.is_local and self.place.exists() and not self.place.is_dir():
            raise CheckpointError(f"{self.place} is not a folder; move it away, or name another --workdir")

    def open(self, writer: str) -> None:
        self.writer = writer

    def existing(self) -> list[str]:
        paths = list(self.place.iterdir()) if self.place.exists() else []
        names = {path.name for path in paths}
        folders = [path.name for path in paths if path.is_dir() and not self._is_begun(path.name, names)]
        return sorted(name for name in folders if not name.startswith(".") and not name.endswith(UNFINISHED))

    def others(self) -> dict[str, str]:
        kinds = {
            DAMAGED: "set aside",
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

    def record(self, step: int) -> Record:
        path = self.place / str(step) / RECORD
        try:
            content = path.read_bytes()
        except self.failures as error:
            raise RunError(f"{path} cannot be read now ({error}); run the command again") from None
        record = parse_json(content, Record, str(path), max_bytes=RECORD_BYTES)
        check_types(record.get("config", {}), f"{path}: config")
        return record

    def arrays(self, step: int) -> dict[str, Files]:
        found = {}
        for file, facts in self._files(step).items():
            if file.startswith(f"{STATE}/") and file.count("/") > 1:  # Orbax has files of its own next to the arrays
                found.setdefault(file.split("/")[1], {})[file] = facts
        return found

    def open_array(self, step: int, name: str) -> TensorStore:
        """Return an array of a local checkpoint, to be read in parts in a block of `check_complete`."""
        return array_files.open_array(pathlib.Path(self.place) / str(step) / STATE, name)

    @contextlib.contextmanager
    def check_complete(self, step: int, parts: Sequence[str]):
        """Raise RunError if files of a checkpoint disappear while the block reads it; its run may delete it.

        This replaces any exception of the block. `parts` are those that the block reads, as in `problems`.
        """
        folder, names = self.place / str(step), sorted(filter(is_in(parts), self._files(step)))
        try:
            yield
        finally:
            own = names[processes.index() :: processes.count()] if self.is_shared else names
            if gone := manifest.missing(folder, own):
                raise RunError(f"{folder} was deleted while it was read ({gone[0]} is missing); run the command again")

    def give_name(self, landing: pathlib.Path, step: int, files: Files) -> None:
        """Flush the folder of a local save and what it contains, and rename it to its step."""
        for path in {landing / manifest.NAME, landing} | {(landing / name).parent for name in files}:
            sync(path)
        checkpoint = self.place / str(step)
        if checkpoint.exists():  # left by a save that failed after this rename
            self.move_aside(step)
        landing.rename(checkpoint)
        sync(self.place)

    def _files(self, step: int) -> Files:
        """Return the files of the manifest; RunError if it cannot be read."""
        folder = self.place / str(step)
        try:
            return manifest.read(folder)["files"]
        except self.failures as error:
            raise RunError(f"{folder}/{manifest.NAME} cannot be read now ({error}); run the command again") from None


def is_in(parts: Sequence[str]) -> Callable[[str], bool]:
    """Return whether a file of a checkpoint is read with these parts of its state, (): all."""

    def is_read(file: str) -> bool:
        words = file.split("/")
        return not parts or words[0] != STATE or len(words) < 3 or words[1].partition(".")[0] in parts

    return is_read


def sync(path) -> None:
    """Flush a file, or the entries of a folder, to disk with fsync."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
