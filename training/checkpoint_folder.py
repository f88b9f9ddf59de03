# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's checkpoints, and what a process does in it alone: its part of a save, and clearing up."""

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

from configs.stored_config import check_types
from files.json_reader import parse_json
from parallelism import processes
from parallelism.hub import RunError
from training import array_files, manifest
from training.bucket import copy_name
from training.record import MAX_BYTES as RECORD_BYTES
from training.record import Record
from training.state import TrainState

FAILURES = (OSError, ValueError, RuntimeError)  # of writing: Python's own, and what TensorStore makes of them
RECORD, ZARRAY = "record.json", ".zarray"
STEP = re.compile("0|[1-9][0-9]{0,9}")  # the name of a checkpoint's folder
UNFINISHED, DAMAGED = ".unfinished", ".damaged"
# Bytes of a copied array that each holder writes a part of; of less one writes all, without a program to cut it.
SMALLEST_PART = 1 << 20


class Folder:
    """The checkpoints of a workdir as files.

    Attributes:
      path: of the folder.
      is_local: whether it is in a file system, and not in a bucket.
      failures: the exceptions that writing to it may raise.
    """

    def __init__(self, workdir, staging: pathlib.Path | None, writer: str = ""):
        """Know the folder of a workdir, or of the address of one in a bucket.

        Args:
          staging: as for `Checkpoints`.
          writer: a name of this run alone, the same in all its processes. Should another run write to the same workdir,
            as after its lock was deleted, neither writes into what the other has not finished.
        """
        path = epath.Path(workdir)
        self.is_local = "://" not in str(workdir)
        self.path = (path.absolute() if self.is_local else path) / "checkpoints"
        self.failures = FAILURES if self.is_local else FAILURES + _failures_of_buckets()
        # Below it a folder for each process of each run.
        place = f"{copy_name(str(self.path.parent))}/process_{processes.index()}"
        self.staging = staging and pathlib.Path(staging).expanduser().absolute() / place
        self.writer, self.num_arrays, self.chunks = writer, 0, {}  # these two are of the save that goes on

    def names(self) -> set[str]:
        """Return the names of all that is in it."""
        return {path.name for path in self.path.iterdir()} if self.path.exists() else set()

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, whatever has become of them since."""
        names = self.names()
        # A local folder gets its name when it is complete; one in a bucket then loses the mark beside it.
        return sorted(
            int(name)
            for name in names
            if STEP.fullmatch(name) and (self.is_local or f"{name}{UNFINISHED}" not in names)
        )

    def existing(self) -> list[str]:
        """Return the names of all checkpoints, also damaged ones; a run must not start from step 0 if there are any."""
        folders = [path.name for path in self.path.iterdir() if path.is_dir()] if self.path.exists() else []
        return sorted(name for name in folders if not name.startswith(".") and not name.endswith(UNFINISHED))

    def others(self) -> dict[str, str]:
        """Return what else there is: {name: what it is}."""
        kinds = {
            DAMAGED: "set aside as damaged",
            UNFINISHED: "an unfinished save or deletion; the next start clears it",
        }
        return {name: what for name in sorted(self.names()) for kind, what in kinds.items() if kind in name}

    def move_aside(self, step: int) -> str:
        """Take the name of a checkpoint from it, whatever it is; return what has become of it."""
        taken = self.names()
        names = (f"{step}{DAMAGED}{number}" for number in ("", *range(2, 1000)))
        name = next(name for name in names if name not in taken)
        try:
            (self.path / str(step)).rename(self.path / name)
        except self.failures as error:
            return f"it could not be set aside ({error})"
        return f"set aside as {name}"

    def begin(self, step: int, state: TrainState) -> ocp.AsyncCheckpointer:
        """Have Orbax copy this process's part of the arrays, and begin to write it."""
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
        # In the background, folders would be announced under one key for all processes: none would wait for its own.
        at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        writer = ocp.AsyncCheckpointer(handler, multiprocessing_options=alone, async_options=at_once)
        writer.save(self.arrays(step), args=ocp.args.PyTreeSave(state))
        return writer

    def arrays(self, step: int) -> pathlib.Path:
        """Return the folder of the arrays of a checkpoint that this process is writing."""
        return self._own(step) / "state"

    def write(self, step: int, writer: ocp.AsyncCheckpointer, record: str) -> None:
        """Wait for the arrays, and write the record."""
        with contextlib.closing(writer):
            writer.wait_until_finished()
        if processes.index() == 0:
            (self._own(step) / RECORD).write_text(record)
            if not self.is_local:
                self.path.mkdir(parents=True, exist_ok=True)
                self._mark(step).write_text("")

    def digest(self, step: int) -> dict[str, list]:
        """Return the digests of this process's part."""
        own = self._own(step)
        names = sorted(str(path.relative_to(own)) for path in own.rglob("*") if path.is_file())
        self.chunks = {name: array_files.chunks(own / name) for name in names if name.endswith(f"/{ZARRAY}")}
        return manifest.digests(own, names)

    def land(self, step: int, files: dict[str, list]) -> None:
        """Move this process's part to where the checkpoint comes together; copies are read back."""
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
        """Make a checkpoint of the files that have landed; OSError where they are not all that its arrays have."""
        landing, checkpoint = self._landing(step), self.path / str(step)
        self._check_complete(files)
        manifest.write(landing, step, files)
        if not self.is_local:
            self._mark(step).unlink()
            return
        for path in {landing / manifest.NAME, landing} | {(landing / name).parent for name in files}:
            _sync(path)
        if checkpoint.exists():  # of a save that was complete and failed after that
            self.move_aside(step)
        landing.rename(checkpoint)
        _sync(self.path)

    def _check_complete(self, files: dict[str, list]) -> None:
        """Raise OSError where files of arrays are missing: somebody has deleted them while they were written.

        A manifest of the others would call the checkpoint good.
        """
        if len(self.chunks) < self.num_arrays:
            raise OSError(f"{len(self.chunks)} of {self.num_arrays} arrays are left; others were deleted meanwhile")
        for name, chunks in self.chunks.items():
            for chunk in chunks:
                if name.removesuffix(ZARRAY) + chunk not in files:
                    raise OSError(f"{name.removesuffix(ZARRAY)}{chunk} is missing; it was deleted meanwhile")

    def remove(self, step: int) -> None:
        """Delete a checkpoint such that, half-deleted, it is none."""
        if self.is_local:
            (self.path / str(step)).rename(self._mark(step))
        else:
            self._mark(step).write_text("")
        self._erase(self._mark(step))

    def drop(self, step: int) -> None:
        """Remove what a save that failed has left, as far as that can be done."""
        shutil.rmtree(self._own(step), ignore_errors=True)
        if processes.index() == 0 and self.is_local:
            shutil.rmtree(self._landing(step), ignore_errors=True)

    def clear(self) -> None:
        """Remove what saves and deletions that were killed, or have failed, left."""
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
          JsonError, ConfigError: it has values that no run has.
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
        """Return the manifest of a checkpoint; RunError where it cannot be read."""
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
        """Delete what is marked as unfinished, the mark last."""
        if self.is_local:
            # Renamed first: another process that finishes this very save would else rename it while it is deleted.
            erased = self.path / f"erased-{secrets.token_hex(4)}{UNFINISHED}"
            with contextlib.suppress(FileNotFoundError):  # the other one was quicker
                mark.rename(erased)
                erased.rmtree()
            return
        (self.path / mark.name.removesuffix(UNFINISHED)).rmtree(missing_ok=True)
        mark.unlink()

    def _own(self, step: int) -> pathlib.Path:
        """Return where this process writes its part."""
        if self.staging:
            return self.staging / f"{step}-{self.writer}"
        return pathlib.Path(self._landing(step)) / f"process_{processes.index()}"

    def _landing(self, step: int):
        """Return where the parts come together."""
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
    """Have a file, or the names in a folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
