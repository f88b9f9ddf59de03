# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's checkpoints, and the file operations of a single process: its part of a save, and cleanup."""

import contextlib
import logging
import os
import pathlib
import re
import secrets
import shutil

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import type_handlers

from checkpointing import array_files, manifest
from checkpointing.bucket import copy_name
from checkpointing.record import MAX_BYTES as RECORD_BYTES
from checkpointing.record import Record
from cluster import processes
from cluster.hub import RunError
from files.json_reader import parse_json
from settings.stored_config import check_types
from training.state import TrainState

FAILURES = (OSError, ValueError, RuntimeError)  # errors of writing, from Python and TensorStore
RECORD, ZARRAY = "record.json", ".zarray"
STEP = re.compile("0|[1-9][0-9]{0,9}")  # the name of a checkpoint's folder
UNFINISHED, DAMAGED = ".unfinished", ".damaged"
# Each replica of an array writes a part of it if the parts have at least this many bytes. Otherwise one replica writes
# all of it, so that no program has to be compiled to slice it.
SMALLEST_PART = 1 << 20


class Folder:
    """The checkpoints of a workdir as files.

    Attributes:
      path: of the folder.
      is_local: whether it is in a file system rather than in a bucket.
      failures: the exceptions that writing to it may raise.
    """

    def __init__(self, workdir, staging: pathlib.Path | None, writer: str = ""):
        """Open the folder of a workdir, which is a path or the address of a bucket folder.

        Args:
          staging: as for `Checkpoints`.
          writer: a unique name of this run, the same in all its processes. If another run writes to the same workdir,
            for example after the lock was deleted, neither run writes into the unfinished save of the other.
        """
        path = epath.Path(workdir)
        self.is_local = "://" not in str(workdir)
        self.path = (path.absolute() if self.is_local else path) / "checkpoints"
        self.failures = FAILURES if self.is_local else FAILURES + _failures_of_buckets()
        # The staging folder has a folder for each process of each run.
        place = f"{copy_name(str(self.path.parent))}/process_{processes.index()}"
        self.staging = staging and pathlib.Path(staging).expanduser().absolute() / place
        self.writer, self.num_arrays, self.chunks = writer, 0, {}  # the last two belong to the present save

    def names(self) -> set[str]:
        """Return the names of all entries of the folder."""
        return {path.name for path in self.path.iterdir()} if self.path.exists() else set()

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that were completely saved; they may be damaged since."""
        names = self.names()
        # A local folder is renamed to the step when it is complete; in a bucket, a separate mark is then deleted.
        return sorted(
            int(name)
            for name in names
            if STEP.fullmatch(name) and (self.is_local or f"{name}{UNFINISHED}" not in names)
        )

    def existing(self) -> list[str]:
        """Return the names of all checkpoints, even damaged ones; a run must not start from step 0 if there are any."""
        folders = [path.name for path in self.path.iterdir() if path.is_dir()] if self.path.exists() else []
        return sorted(name for name in folders if not name.startswith(".") and not name.endswith(UNFINISHED))

    def others(self) -> dict[str, str]:
        """Return {name: description} of damaged and unfinished checkpoints."""
        kinds = {
            DAMAGED: "set aside as damaged",
            UNFINISHED: "an unfinished save or deletion; the next start clears it",
        }
        return {name: what for name in sorted(self.names()) for kind, what in kinds.items() if kind in name}

    def move_aside(self, step: int) -> str:
        """Rename a checkpoint, so that it is not used; return a text that says where it is now."""
        taken = self.names()
        names = (f"{step}{DAMAGED}{number}" for number in ("", *range(2, 1000)))
        name = next(name for name in names if name not in taken)
        try:
            (self.path / str(step)).rename(self.path / name)
        except self.failures as error:
            return f"it could not be set aside ({error})"
        return f"set aside as {name}"

    def begin(self, step: int, state: TrainState) -> ocp.AsyncCheckpointer:
        """Copy this process's part of the arrays with Orbax, and start to write it; return the Orbax writer."""
        own, self.num_arrays = self._own(step), len(jax.tree.leaves(state))
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True)
        alone = ocp.options.MultiprocessingOptions(
            primary_host=processes.index(), active_processes={processes.index()},
            barrier_sync_key_prefix=f"process-{processes.index()}",
        )  # fmt: skip
        arrays = type_handlers.ArrayHandler(
            primary_host=processes.index(), array_metadata_store=None,
            min_slice_bytes_for_replica_parallel=SMALLEST_PART,
        )  # fmt: skip
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, multiprocessing_options=alone,
            type_handler_registry=type_handlers.create_type_handler_registry((jax.Array, arrays)),
        )  # fmt: skip
        # Asynchronously created folders are signalled under one key for all processes, so none would wait for its own.
        at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        writer = ocp.AsyncCheckpointer(handler, multiprocessing_options=alone, async_options=at_once)
        writer.save(self.arrays(step), args=ocp.args.PyTreeSave(state))
        return writer

    def arrays(self, step: int) -> pathlib.Path:
        """Return the folder of arrays of a checkpoint that this process is writing."""
        return self._own(step) / "state"

    def write(self, step: int, writer: ocp.AsyncCheckpointer, record: str) -> None:
        """Wait until the arrays are written; in process 0, write the record, and in a bucket the mark."""
        with contextlib.closing(writer):
            writer.wait_until_finished()
        if processes.index() == 0:
            (self._own(step) / RECORD).write_text(record)
            if not self.is_local:
                self.path.mkdir(parents=True, exist_ok=True)
                self._mark(step).write_text("")

    def digest(self, step: int) -> dict[str, list]:
        """Return {file: [bytes, SHA-256]} of this process's part."""
        own = self._own(step)
        names = sorted(str(path.relative_to(own)) for path in own.rglob("*") if path.is_file())
        self.chunks = {name: array_files.chunks(own / name) for name in names if name.endswith(f"/{ZARRAY}")}
        return manifest.digests(own, names)

    def land(self, step: int, files: dict[str, list]) -> None:
        """Move `files` of this process's part to the common folder; copies from staging are read back and verified."""
        own, landing = self._own(step), self._landing(step)
        for name in files:
            (landing / name).parent.mkdir(parents=True, exist_ok=True)
            if not self.staging:
                os.replace(own / name, landing / name)
                continue
            with (own / name).open("rb") as source, (landing / name).open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 24)
        if self.staging and manifest.digests(landing, list(files)) != files:
            raise OSError(f"a copy below {landing} is not what was copied")
        if self.is_local:
            for name in files:
                _sync(landing / name)
        shutil.rmtree(own)

    def commit(self, step: int, files: dict[str, list]) -> None:
        """Complete a checkpoint from the landed files; OSError if files of its arrays are missing."""
        landing, checkpoint = self._landing(step), self.path / str(step)
        self._check_complete(files)
        manifest.write(landing, step, files)
        if not self.is_local:
            self._mark(step).unlink()
            return
        for path in {landing / manifest.NAME, landing} | {(landing / name).parent for name in files}:
            _sync(path)
        if checkpoint.exists():  # left by a save that failed after this rename
            self.move_aside(step)
        landing.rename(checkpoint)
        _sync(self.path)

    def _check_complete(self, files: dict[str, list]) -> None:
        """Raise OSError if files of arrays are missing because they were deleted while they were written.

        A manifest of the remaining files would declare the checkpoint valid.
        """
        if len(self.chunks) < self.num_arrays:
            raise OSError(f"{len(self.chunks)} of {self.num_arrays} arrays are left; others were deleted meanwhile")
        for name, chunks in self.chunks.items():
            for chunk in chunks:
                if name.removesuffix(ZARRAY) + chunk not in files:
                    raise OSError(f"{name.removesuffix(ZARRAY)}{chunk} is missing; it was deleted meanwhile")

    def remove(self, step: int) -> None:
        """Delete a checkpoint; it is marked first, so that a partly deleted one does not count as a checkpoint."""
        if self.is_local:
            (self.path / str(step)).rename(self._mark(step))
        else:
            self._mark(step).write_text("")
        self._erase(self._mark(step))

    def drop(self, step: int) -> None:
        """Remove the files of a failed save, as far as possible."""
        shutil.rmtree(self._own(step), ignore_errors=True)
        if processes.index() == 0 and self.is_local:
            shutil.rmtree(self._landing(step), ignore_errors=True)

    def clear(self) -> None:
        """Remove the files of saves and deletions that failed or were killed."""
        if self.staging:
            shutil.rmtree(self.staging, ignore_errors=True)
        if processes.index() == 0:
            for name in self.names():
                if name.endswith(UNFINISHED):
                    self._erase(self.path / name)

    def record(self, step: int) -> Record:
        """Return the record of a checkpoint.

        Raises:
          RunError: it cannot be read.
          JsonError, ConfigError: it has invalid values.
        """
        path = self.path / str(step) / RECORD
        try:
            content = path.read_bytes()
        except self.failures as error:
            raise RunError(f"{path} cannot be read now ({error}); run the command again") from None
        record = parse_json(content, Record, str(path), max_bytes=RECORD_BYTES)
        check_types(record.get("config", {}), f"{path}: config")
        return record

    def manifest(self, step: int) -> manifest.Manifest:
        """Return the manifest of a checkpoint; RunError if it cannot be read."""
        folder = self.path / str(step)
        try:
            return manifest.read(folder)
        except self.failures as error:
            raise RunError(f"{folder}/{manifest.NAME} cannot be read now ({error}); run the command again") from None

    @contextlib.contextmanager
    def check_complete(self, step: int):
        """Raise RunError if files of a checkpoint disappear while the block reads it; its run may delete it.

        This replaces any exception of the block.
        """
        folder, names = self.path / str(step), sorted(self.manifest(step)["files"])
        try:
            yield
        finally:
            if gone := manifest.missing(folder, names[processes.index() :: processes.count()]):
                raise RunError(f"{folder} was deleted while it was read ({gone[0]} is missing); run the command again")

    def _erase(self, mark) -> None:
        """Delete an unfinished checkpoint, its mark last."""
        if self.is_local:
            # Rename first: otherwise a process that completes this save could rename the folder during the deletion.
            erased = self.path / f"erased-{secrets.token_hex(4)}{UNFINISHED}"
            with contextlib.suppress(FileNotFoundError):  # the other process was faster
                mark.rename(erased)
                erased.rmtree()
            return
        (self.path / mark.name.removesuffix(UNFINISHED)).rmtree(missing_ok=True)
        mark.unlink()

    def _own(self, step: int) -> pathlib.Path:
        """Return the folder that this process writes its part to."""
        if self.staging:
            return self.staging / f"{step}-{self.writer}"
        return pathlib.Path(self._landing(step)) / f"process_{processes.index()}"

    def _landing(self, step: int):
        """Return the folder that combines the parts of all processes."""
        return self.path / (f"{step}-{self.writer}{UNFINISHED}" if self.is_local else str(step))

    def _mark(self, step: int):
        """Return the mark of an unfinished checkpoint: its folder's name, or in a bucket a separate file."""
        return self.path / f"{step}{UNFINISHED}"


def _failures_of_buckets() -> tuple:
    """Return the exceptions of gcsfs besides OSError, and silence its log; imported late, since it is slow."""
    from aiohttp import ClientError
    from gcsfs.retry import ChecksumError, HttpError
    from google.auth.exceptions import GoogleAuthError

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    return ClientError, ChecksumError, HttpError, GoogleAuthError


def _sync(path) -> None:
    """Flush a file, or the entries of a folder, to disk with fsync."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
