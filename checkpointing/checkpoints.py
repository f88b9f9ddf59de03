# SPDX-License-Identifier: Apache-2.0
"""Save and restore a run's state: asynchronously, atomically, verified, onto any mesh.

A checkpoint is a folder with the arrays in Orbax's format, a record (configuration, data position, library versions)
and a manifest with the digest of every file, which is written last. Orbax writes the part of each process to a separate
folder, as in a run of one process, so that no barrier of Orbax waits for a process whose disk is full. Then the
processes agree through the hub and combine the parts. A failed save is reported and retried while the run continues.
"""

import functools
import json
import logging
import os
import pathlib
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from checkpointing import manifest
from checkpointing.checkpoint_folder import Folder
from checkpointing.record import Record
from checkpointing.retention import Retention
from cluster import identity, processes
from cluster.hub import RunError
from cluster.interruption import Interrupted
from reporting.step_log import NonFinite
from training.state import TrainState

LEAST_STEPS = 4  # between checks for a retry, since each check gathers values from all processes
RETRIES = 16  # the first retry comes after save_every / RETRIES steps, the next after 2, 4, ... times as many
LAST_TRIES_SECONDS = (0.0, 1.0, 5.0)  # pauses before the attempts to save the last state of a run
PATIENCE_SECONDS = 5.0  # limit of the wait for the previous save
OF_TENSORSTORE = re.compile(r"""[^"]*"(?P<path>[^"]*)".*\[os_error_code='(?P<code>\d+)'\]""", re.DOTALL)
for noisy in ("absl", "asyncio"):  # Orbax warns at every save; failures are reported by this file
    logging.getLogger(noisy).setLevel(logging.CRITICAL)


class CheckpointError(ValueError):
    """A workdir that cannot be used as requested; the user has to correct it."""

    exit_status = 2


class Damaged(CheckpointError):
    """The workdir has checkpoints, and all of them are damaged."""

    exit_status = 1


class SaveFailed(RunError):
    """The state could not be saved; the message says why, and in which process."""


class Checkpoints:
    """The checkpoints of one workdir; a context manager that ends with the last save on disk.

    Attributes:
      losses: {step: held-out loss}, which decides the best checkpoints.
      report: called with a line, and figures by name, when a checkpoint was saved, was not saved, or is damaged.
      early_events: figures of reports from before `report` was set.
      on_save: called in the background after each save.
    """

    def __init__(self, workdir, retention: Retention | None = None, *, staging: pathlib.Path | None = None):
        """Open the checkpoints of a folder, or of the address of one in a bucket.

        Args:
          retention: retention policy; None: read-only, while a run may still write.
          staging: local folder to which they are saved before they are copied to `workdir`; a bucket needs one.
        """
        writer = processes.shared("writer", lambda: secrets.token_hex(4)) if retention else ""
        self.address, self.files = workdir, Folder(workdir, staging, writer)
        self.retention, self.losses = retention, {}
        self.early_events: list[dict] = []
        self.report: Callable[..., None] = self._report_early
        self.on_save: Callable[[], None] = lambda: None
        self.saving: threading.Thread | None = None
        self.failure: SaveFailed | None = None  # of the last save
        self.failures = self.parts_waited = 0
        self.begun: int | None = None  # step of the last save, or of the restored checkpoint
        if self.files.is_local and self.files.path.exists() and not self.files.path.is_dir():
            raise CheckpointError(f"{self.files.path} is no folder; move it away, or name another --workdir")
        if retention:
            try:
                self.files.clear()
            except self.files.failures as error:
                self.report(f"what an earlier run left in {self.files.path} cannot be cleared: {error}")

    def _report_early(self, text: str, **figures) -> None:
        self.early_events.append(figures)
        if text:
            print(text, file=sys.stderr, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, kind, *unused):
        # Waiting needs all processes, and those of a run that fails may never come.
        together = kind is None or issubclass(kind, Interrupted | NonFinite)
        if together or (processes.count() == 1 and not issubclass(kind, KeyboardInterrupt)):
            self.wait()
            if self.failure and (kind is None or issubclass(kind, Interrupted)):
                raise self.failure

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that process 0 finds complete; they may be damaged."""
        return processes.shared("checkpoints", self.files.steps)

    def newest(self) -> int | None:
        """Return the step of the newest valid checkpoint; None if there never was one.

        Damaged checkpoints are reported and, unless this is read-only, set aside. Raises Damaged if none is valid.
        """
        found = self.steps()
        for step in reversed(found):
            problems = self.problems(step)
            if not problems:
                return step
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            self.set_aside(step, f"is damaged: {'; '.join(problems[:3])}{more}")
        existing = processes.shared("existing", self.files.existing)
        if existing:
            names = ", ".join(existing)
            raise Damaged(
                f"no checkpoint in {self.files.path} is what was saved (there are {names}); bring one back "
                "from a copy, or train in another --workdir"
            )
        return None

    def newest_or_error(self) -> int:
        """Return the step of the newest valid checkpoint. Raises CheckpointError if there is none."""
        step = self.newest()
        if step is None:
            raise CheckpointError(
                f"{self.files.path} has no complete checkpoint; train first, or name another --workdir"
            )
        return step

    def problems(self, step: int) -> list[str]:
        """Return the problems of a checkpoint's files; each process checks a part of them."""
        try:
            mine = manifest.problems(self.files.path / str(step), part=processes.index(), parts=processes.count())
        except OSError as error:
            raise RunError(f"checkpoint {step} cannot be read now: {error}; nothing was changed, try again") from None
        return sorted({problem for found in processes.gather(f"problems {step}", mine) for problem in found})

    def set_aside(self, step: int, why: str) -> None:
        """Rename a checkpoint that must not be used, unless this is read-only, and report `why`."""
        fate = "an older one is taken"
        if self.retention:
            fate = processes.shared(f"aside {step}", lambda: self.files.move_aside(step))
        self.report(f"checkpoint {step} {why}; {fate}", event="damaged", step=step)

    def record(self, step: int) -> Record:
        """Return the record of `step`. Raises the errors of `Folder.record`."""
        return processes.shared(f"record {step}", lambda: self.files.record(step))

    def _read(self, step: int, handler, arguments):
        with self.files.check_complete(step), ocp.Checkpointer(handler) as reader:
            return reader.restore(self.files.path / str(step) / "state", args=arguments)

    def restore(self, step: int, abstract_state):
        """Restore the state of `step` in the shapes, types and shardings of `abstract_state`."""
        return self._read(step, ocp.StandardCheckpointHandler(), ocp.args.StandardRestore(abstract_state))

    def restore_by_broadcast(self, step: int, abstract_state: TrainState, mesh: jax.sharding.Mesh) -> TrainState:
        """Restore like `restore`, but only the hosts of one replica read, and broadcast to the others.

        Raises CheckpointError if a host has devices of several replicas.
        """
        axis = "dcn_data" if mesh.shape["dcn_data"] > 1 else "data"
        _check_copies_are_hosts(mesh, axis)
        if mesh.shape[axis] == 1 or processes.count() == 1:
            return self.restore(step, abstract_state)
        handler = type_handlers.SingleReplicaArrayHandler(replica_axis_index=mesh.axis_names.index(axis))
        registry = type_handlers.create_type_handler_registry((jax.Array, handler))
        restore_args = jax.tree.map(
            lambda leaf: type_handlers.SingleReplicaArrayRestoreArgs(
                sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
            ),
            abstract_state,
        )
        arguments = ocp.args.PyTreeRestore(item=abstract_state, restore_args=restore_args)
        return self._read(step, ocp.PyTreeCheckpointHandler(type_handler_registry=registry), arguments)

    def eval_params_part(self, step: int) -> str:
        """Return the part of the state of `step` for evaluation: "average" if there is one, else "params"."""
        files = self.files.manifest(step)["files"]
        return "average" if any(name.startswith("state/average.") for name in files) else "params"

    def restore_eval_params(self, step: int, abstract_params: dict) -> dict:
        """Restore the parameters of `step` for evaluation, in the shapes and shardings of `abstract_params`."""
        return self.restore_params(step, abstract_params, self.eval_params_part(step))

    def restore_params(self, step: int, abstract_params: dict, part: str) -> dict:
        """Restore the parameters in `part` of the state, "params" or "average"."""
        item = {part: abstract_params}
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        arguments = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
        return self._read(step, ocp.PyTreeCheckpointHandler(), arguments)[part]

    def save(self, step: int, state: TrainState, record: dict) -> None:
        """Start to write `state`; return when its arrays are copied.

        A failure, or an unfinished earlier save, is reported; `due_again` decides when to retry.
        """
        self.wait(PATIENCE_SECONDS)
        if any(processes.gather("saving", self.saving is not None and self.saving.is_alive())):
            self.report(f"step {step} not saved: the save before is still going on", event="save_left_out", step=step)
            return
        started, self.begun = time.perf_counter(), step
        text = _as_text(record)  # now, since the next step may change its contents
        writer = failed = None
        try:
            writer = self.files.begin(step, state)
        except self.files.failures as error:
            failed = error

        def write() -> None:
            if failed:  # raised in the thread, which reports all failures to all processes
                raise failed
            self.files.write(step, writer, text)

        blocked = time.perf_counter() - started
        self.failure = SaveFailed(f"the save of step {step} has not come to its end")
        self.saving = threading.Thread(target=self._finish, args=(step, write, blocked), daemon=True)
        self.saving.start()

    def postpone(self, why: str, step: int) -> None:
        """Report why a step is not saved; `due_again` decides when to retry."""
        self.report(why, event="save_left_out", step=step)
        self.failures = max(1, self.failures)

    def save_and_wait(self, step: int, state: TrainState, record: dict) -> None:
        """Save the last state of the run and wait until it is on disk; raise SaveFailed after some retries."""
        self.wait()
        if step == self.begun and not self.failure:
            return
        for pause in LAST_TRIES_SECONDS:
            time.sleep(pause)
            self.save(step, state, record)
            self.wait()
            if not self.failure:
                return
        kept = self.steps()
        since = f"the steps after checkpoint {kept[-1]}" if kept else "all steps of the run"
        raise SaveFailed(f"{self.failure}; {since} are lost")

    def save_weights(self, step: int, params: dict, fill: Callable[[pathlib.Path], None], record: dict) -> None:
        """Save parameters only, one array at a time, and wait until they are on disk; raise SaveFailed otherwise.

        Args:
          params: their tree; the leaves are not read.
          fill: writes every array into a folder, by checkpointing/array_files.py, under the name params.PATH.
        """
        self.report = lambda text, **figures: None  # a failure is raised and ends the command
        writer = self.files.begin(step, {"params": jax.tree.map(lambda _: jax.numpy.zeros(1), params)})  # place holders

        def write() -> None:
            self.files.write(step, writer, _as_text(record))
            fill(self.files.arrays(step))

        self._finish(step, write, 0.0)
        if self.failure:
            raise self.failure

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the present save is complete or has failed, or for some seconds."""
        if self.saving:
            self.saving.join(seconds)

    def due_again(self, step: int, save_every: int) -> bool:
        """Return whether to retry a failed save after `step`; the same in all processes."""
        part = max(LEAST_STEPS, save_every // RETRIES)
        if part >= save_every or step % part:
            return False
        going_on = self.saving is not None and self.saving.is_alive()
        found = processes.gather("failed saves", [going_on, self.failures])
        failures = max(number for _, number in found)
        if any(going_on for going_on, _ in found) or not failures:
            return False
        self.parts_waited += 1
        if self.parts_waited < 2 ** (failures - 1):
            return False
        self.parts_waited = 0
        return True

    def _finish(self, step: int, write: Callable[[], None], blocked: float) -> None:
        """Write arrays and record, compute digests, combine the parts of all processes, clean up; in the background."""
        started = time.perf_counter()
        try:
            self._together(f"written {step}", write)
            written = time.perf_counter()
            part = self._together(f"digested {step}", lambda: self.files.digest(step))
            digested = time.perf_counter()
            files, mine = _shared_out(processes.gather(f"files {step}", part))
            self._together(f"landed {step}", lambda: self.files.land(step, mine))
            self._together(f"committed {step}", lambda: processes.index() == 0 and self.files.commit(step, files))
        except SaveFailed as failure:
            self._failed(step, failure)
            return
        self.failure, self.failures = None, 0
        seconds = {"blocked": blocked, "write": written - started, "digest": digested - written}
        seconds["background"] = time.perf_counter() - started
        try:
            self.report("", event="saved", step=step, **{f"{name}_seconds": value for name, value in seconds.items()})
            self._clear_after()
        except self.files.failures as error:
            self.report(f"step {step} is saved, but clearing up failed: {error}", event="not_cleared", step=step)

    def _together(self, topic: str, work: Callable[[], object]):
        """Run a part of a save in every process; return this one's result. If one fails, all raise SaveFailed."""
        value = problem = None
        try:
            value = work()
        except self.files.failures as error:
            problem = _one_line(error)
        for number, found in enumerate(processes.gather(topic, problem)):
            if found:
                raise SaveFailed(f"{processes.name(number)}: {found}" if processes.count() > 1 else found)
        return value

    def _clear_after(self) -> None:
        """Delete checkpoints by the retention policy, and the remains of earlier saves."""
        self.files.clear()
        if processes.index() == 0:
            steps = self.files.steps()
            for old in set(steps) - self.retention.reasons(steps, self.losses).keys():
                self.files.remove(old)
        self.on_save()

    def _failed(self, step: int, failure: SaveFailed) -> None:
        self.failure, self.failures = failure, self.failures + 1
        self.files.drop(step)
        self.report(
            f"step {step} could not be saved: {failure}; training goes on, and it is tried again",
            event="save_failed", step=step, error=str(failure),
        )  # fmt: skip


def _as_text(record: dict) -> str:
    return json.dumps(record | {"versions": identity.versions()})


def _shared_out(parts: list[dict[str, list]]) -> tuple[dict[str, list], dict[str, list]]:
    """Return the files of all parts, and those that this process moves; the first process owns files of equal name."""
    owners = {name: number for number, part in reversed([*enumerate(parts)]) for name in part}
    files = {name: parts[number][name] for name, number in sorted(owners.items())}
    return files, {name: facts for name, facts in files.items() if owners[name] == processes.index()}


def _one_line(error: Exception) -> str:
    """Return an error as one line; for TensorStore's errors, only the file and the cause."""
    text = str(error)
    if found := OF_TENSORSTORE.match(text):
        text = f"{found['path']}: {os.strerror(int(found['code']))}"
    return " ".join(text.split())[:400] or type(error).__name__


def _without_late_writes(usual: Callable, unraisable) -> None:
    """Suppress TensorStore's message for each write that ends after Orbax has cancelled a failed save."""
    if str(unraisable.exc_value) != "Event loop is closed":
        usual(unraisable)


sys.unraisablehook = functools.partial(_without_late_writes, sys.unraisablehook)


def _check_copies_are_hosts(mesh: jax.sharding.Mesh, axis: str) -> None:
    """Raise CheckpointError if a process of several has devices of more than one replica along the axis."""
    copies = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0)
    for number in range(processes.count()):
        held = sum(any(device.process_index == number for device in copy.flat) for copy in copies)
        if held > 1 and processes.count() > 1:
            raise CheckpointError(
                f"checkpoint.restore=broadcast: {processes.name(number)} has devices of {held} copies of the model "
                f"(mesh.{axis}={mesh.shape[axis]}); use read, or a mesh whose copies are whole hosts"
            )
