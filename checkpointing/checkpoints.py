# SPDX-License-Identifier: Apache-2.0
"""Save and restore a run's state: asynchronously, atomically, verified, onto any mesh.

This file has what all stores of checkpoints share: when to save, what to keep, what is valid, and the agreement of all
processes through the hub. A `Store` (checkpointing/store.py) reads and writes the bytes. A failed save is reported and
retried while the run continues.
"""

import contextlib
import json
import pathlib
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence

import jax

from checkpointing import state_names
from checkpointing.bucket import failures_of
from checkpointing.host_folders import part_problems
from checkpointing.record import Record
from checkpointing.retention import Retention
from checkpointing.shared_folder import SharedFolder, check_copies_are_hosts
from checkpointing.store import CheckpointError, Store
from cluster import identity, processes
from cluster.hub import RunError
from cluster.interruption import Interrupted
from configs.errors import OfAllProcesses
from reporting.display import listed
from reporting.step_log import NonFinite
from training.state import TrainState

LEAST_STEPS = 4  # between checks for a retry, since each check gathers values from all processes
RETRIES = 16  # the first retry comes after save_every / RETRIES steps, the next after 2, 4, ... times as many
LAST_TRIES_SECONDS = (0.0, 1.0, 5.0)  # pauses before the attempts to save the last state of a run
PATIENCE_SECONDS = 5.0  # limit of the wait for the previous save
Work = Callable[[], None]
MOST_NAMED = 3  # problems or arrays that a message names
MOST_LOOKS = 10  # at the folder, while a run deletes the checkpoints that are read


class Damaged(CheckpointError):
    """The workdir has checkpoints, and all of them are damaged."""

    exit_status = 1


class SaveFailed(OfAllProcesses, RunError):
    """The state could not be saved; the message says why, and in which process."""


class Checkpoints:
    """The checkpoints of one workdir; a context manager that ends with the last save on disk.

    Attributes:
      losses: {step: held-out loss}, which decides the best checkpoints.
      report: called with a line, and figures by name, when a checkpoint was saved, was not saved, or is damaged.
      early_events: figures of reports from before `report` was set.
      on_save: called in the background after each save.
    """

    def __init__(
        self, workdir, retention: Retention | None = None, *, staging: pathlib.Path | None = None,
        store: Store | None = None,
    ):  # fmt: skip
        """Open the checkpoints of a run.

        Args:
          workdir: its folder, or the address of its folder in a bucket.
          retention: retention policy; None: read-only, while a run may still write.
          staging: local folder to which they are saved before they are copied to `workdir`; a bucket needs one.
          store: where they are; default: in `workdir`.
        """
        self.address, self.store = workdir, store or SharedFolder(workdir, staging)
        self.retention, self.losses = retention, {}
        self.early_events: list[dict] = []
        self.report: Callable[..., None] = self._report_early
        self.on_save: Work = lambda: None
        self.saving: threading.Thread | None = None
        self.error: BaseException | None = None  # what ended that thread
        self.failure: SaveFailed | None = None  # of the last save
        self.failures = self.parts_waited = 0
        self.owes, self.goes_on = False, True  # whether a save was left out since the last began; whether the run does
        self.begun: int | None = None  # step of the last save, or of the restored checkpoint
        if retention:
            self.store.open(processes.shared("writer", lambda: secrets.token_hex(4)))
            try:
                self.store.clear()
            except self.store.failures as error:
                remains = f"the remains of an earlier run in {self.store.place} cannot be deleted: {error}"
                self.report(remains, event="not_cleared")

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

    def _answers(self, topic: str, ask: Callable[[], object]) -> list:
        """Return what each process finds in its part of the store; if the store is shared, what process 0 finds."""
        return [processes.shared(topic, ask)] if self.store.is_shared else processes.gather(topic, ask())

    def _held(self) -> list[set[int]]:
        """Return the steps of the checkpoints that are complete, for each part of the store."""
        return [set(steps) for steps in self._answers("checkpoints", self.store.steps)]

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that are complete in all processes; they may be damaged."""
        return sorted(set.intersection(*self._held()))

    def newest(self) -> int | None:
        """Return the step of the newest valid checkpoint; None if there never was one.

        Damaged checkpoints are reported and, unless this is read-only, set aside. Readers need valid weights only. If
        a run deletes what is read here, its newer checkpoints are looked for.

        Raises:
          Damaged: there are checkpoints, and none is valid.
          CheckpointError: parts of the checkpoints are missing; the message names the processes that had them.
        """
        for _ in range(MOST_LOOKS):
            step, has_gone = self._newest_now()
            if step is not None or not has_gone:
                return step
        raise CheckpointError(f"{self.store.place}: a run deletes its checkpoints faster than they are read; try later")

    def _newest_now(self) -> tuple[int | None, bool]:
        """Return the step of `newest`, and whether a checkpoint has gone meanwhile."""
        held = self._held()
        steps = sorted(set().union(*held), reverse=True)
        if steps and not set.intersection(*held):
            raise CheckpointError(
                f"{self.store.place}: {_lacking(held, steps[0])} no part of checkpoint {steps[0]}, and no older one is "
                "complete; start on the hosts that saved it, or train in another --workdir"
            )
        parts, has_gone = () if self.retention else state_names.WEIGHTS, False
        for step in steps:
            if any(step not in part for part in held):
                self.set_aside(step, f"is damaged: {_lacking(held, step)} no part of it")
            elif problems := self.damage(step, parts):
                self.set_aside(step, f"is damaged: {listed(problems, MOST_NAMED, '; ')}")
            elif problems is None:
                has_gone = True
            else:
                return step, has_gone
        if has_gone:
            return None, True
        if existing := sorted({name for names in self._answers("existing", self.store.existing) for name in names}):
            raise Damaged(
                f"no checkpoint in {self.store.place} is valid (folders there: {', '.join(existing)}); restore one "
                "from a backup, or train in another --workdir"
            )
        return None, False

    def damage(self, step: int, parts: Sequence[str] = ()) -> list[str] | None:
        """Return the problems of a checkpoint, as `problems`; None if it is gone, as a run deletes its older ones."""
        found = self.problems(step, parts) or part_problems(self.store, step)
        return None if found and not any(step in part for part in self._held()) else found

    def newest_or_error(self) -> int:
        """Return the step of the newest valid checkpoint. Raises CheckpointError if there is none."""
        if (step := self.newest()) is None:
            raise CheckpointError(
                f"{self.store.place} has no complete checkpoint; train first, or name another --workdir"
            )
        return step

    def problems(self, step: int, parts: Sequence[str] = ()) -> list[str]:
        """Return the problems of a checkpoint's files, as `Store.problems`; each process checks a part of them."""
        try:
            mine = self.store.problems(step, parts)
        except failures_of(str(self.store.place)) as error:
            raise RunError(f"checkpoint {step} cannot be read now: {error}; nothing was changed, try again") from None
        return sorted({problem for found in processes.gather(f"problems {step}", mine) for problem in found})

    def set_aside(self, step: int, why: str, event: str = "damaged") -> None:
        """Rename a checkpoint that must not be used, unless this is read-only, and report `why`."""
        fate = "it is left out"
        if self.retention:
            held = step in self.store.steps()
            fates = self._answers(f"aside {step}", lambda: self.store.move_aside(step) if held else "")
            fate = next(filter(None, fates), "it has disappeared")
        self.report(f"checkpoint {step} {why}; {fate}", event=event, step=step)

    def record(self, step: int) -> Record:
        """Return the record of `step`. Raises the errors of `Store.record`."""
        return processes.shared(f"record {step}", lambda: self.store.record(step))

    def restore(self, step: int, abstract_state: TrainState, replica_axis: int | None = None) -> TrainState:
        """Restore the state of `step` in the shapes, types and shardings of `abstract_state`.

        Raises CheckpointError if the checkpoint has other arrays than the state.
        """
        arrays = state_names.as_arrays(abstract_state)
        self._check_names(step, state_names.differences(self.store.arrays(step), state_names.names_of(arrays)))
        return state_names.as_state(self.store.restore(step, arrays, replica_axis), abstract_state)

    def restore_by_broadcast(self, step: int, abstract_state: TrainState, mesh: jax.sharding.Mesh) -> TrainState:
        """Restore like `restore`, but only the hosts of one replica read, and broadcast to the others.

        Raises CheckpointError if a host has devices of several replicas.
        """
        axis = "dcn_data" if mesh.shape["dcn_data"] > 1 else "data"
        check_copies_are_hosts(mesh, axis)
        alone = mesh.shape[axis] == 1 or processes.count() == 1
        return self.restore(step, abstract_state, None if alone else mesh.axis_names.index(axis))

    def eval_params_part(self, step: int) -> str:
        """Return the part of the state of `step` for evaluation: "average" if there is one, else "params"."""
        return state_names.eval_part(self.store.arrays(step))

    def restore_eval_params(self, step: int, abstract_params: dict) -> dict:
        """Restore the parameters of `step` for evaluation, in the shapes and shardings of `abstract_params`."""
        return self.restore_params(step, abstract_params, self.eval_params_part(step))

    def restore_params(self, step: int, abstract_params: dict, part: str) -> dict:
        """Restore the parameters in `part` of the state, "params" or "average"; CheckpointError if one is missing."""
        missing = state_names.names_of({part: abstract_params}) - self.store.arrays(step).keys()
        self._check_names(step, [f"lacks {name}" for name in sorted(missing)])
        return self.store.restore(step, {part: abstract_params})[part]

    def _check_names(self, step: int, differences: list[str]) -> None:
        """Raise CheckpointError if the names of a checkpoint's arrays are not those of the state."""
        if differences:
            versions = ", ".join(f"{name} {version}" for name, version in self.record(step).get("versions", {}).items())
            unlike = listed(differences, MOST_NAMED, "; ")
            raise CheckpointError(
                f"checkpoint {step} of {self.address} {unlike}, unlike the state of this run; restore "
                f"it with the configuration and the versions that saved it ({versions})"
            )

    def save(self, step: int, state: TrainState, record: dict, write_first: Work = lambda: None) -> None:
        """Start to write `state`; return when its arrays are copied.

        A failure, or an unfinished earlier save, is reported; `due_again` decides when to retry. `write_first` writes
        what belongs to the checkpoint and is not in it; the save fails with it.
        """
        self.wait(PATIENCE_SECONDS)
        if any(processes.gather("saving", self.saving is not None and self.saving.is_alive())):
            self.postpone(f"step {step} not saved: the previous save is still running", step)
            return
        started, self.begun, self.owes = time.perf_counter(), step, False
        text = _as_text(record)  # now, since the next step may change its contents
        failed = None
        try:
            self.store.begin(step, state_names.as_arrays(state))
        except self.store.failures as error:
            failed = error

        def write() -> None:
            if failed:  # raised in the thread, which reports all failures to all processes
                raise failed
            write_first()
            self.store.write(step, text)

        blocked = time.perf_counter() - started
        self.failure = SaveFailed(f"the save of step {step} has not come to its end")
        self.saving = threading.Thread(target=self._in_thread, args=(step, write, blocked), daemon=True)
        self.saving.start()

    def postpone(self, why: str, step: int) -> None:
        """Report why a step is not saved; `due_again` decides when to retry."""
        self.report(why, event="save_left_out", step=step)
        self.owes = True

    def save_and_wait(self, step: int, state: TrainState, record: dict, write_first: Work = lambda: None) -> None:
        """Save the last state of the run and wait until it is on disk; raise SaveFailed after some retries."""
        self.wait()
        if step == self.begun and not self.failure:
            return
        self.goes_on = False
        for pause in LAST_TRIES_SECONDS:
            time.sleep(pause)
            self.save(step, state, record, write_first)
            self.wait()
            if not self.failure:
                return
        kept = self.steps()
        since = f"the steps after checkpoint {kept[-1]}" if kept else "all steps of the run"
        raise SaveFailed(f"{self.failure}; {since} are lost")

    def save_at_once(self, step: int, state: TrainState | dict, record: dict) -> None:
        """Save in this thread; raise SaveFailed without a report or a second attempt."""
        self.report = lambda text, **figures: None
        self.store.begin(step, state_names.as_arrays(state))
        self._finish(step, lambda: self.store.write(step, _as_text(record)), 0.0)
        if self.failure:
            raise self.failure

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the present save is complete or has failed, or for some seconds; raise what ended its thread."""
        if self.saving:
            self.saving.join(seconds)
        if self.error:
            raise self.error

    def due_again(self, step: int, save_every: int) -> bool:
        """Return whether to retry a save that failed or was left out after `step`; the same in all processes."""
        part = max(LEAST_STEPS, save_every // RETRIES)
        if part >= save_every or step % part:
            return False
        going_on = self.saving is not None and self.saving.is_alive()
        found = processes.gather("failed saves", [going_on, self.failures])
        failures = max(self.owes, *(number for _, number in found))
        if any(going_on for going_on, _ in found) or not failures:
            return False
        self.parts_waited += 1
        if self.parts_waited < 2 ** (failures - 1):
            return False
        self.parts_waited = 0
        return True

    def _in_thread(self, step: int, write: Work, blocked: float) -> None:
        with contextlib.ExitStack() as at_the_end:
            at_the_end.push(self._keep_error)
            self._finish(step, write, blocked)

    def _keep_error(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self.error = error

    def _finish(self, step: int, write: Work, blocked: float) -> None:
        """Run a save from its second phase (see checkpointing/store.py) to its end, in the background; then clean up.

        `write` is the second phase. The first one stopped the training loop for `blocked` seconds.
        """
        started = time.perf_counter()
        try:
            self._together(f"written {step}", write)
            written = time.perf_counter()
            part = self._together(f"digested {step}", lambda: self.store.describe(step))
            digested = time.perf_counter()
            parts = processes.gather(f"files {step}", part)
            self._together(f"landed {step}", lambda: self.store.join(step, parts))
            self._together(f"committed {step}", lambda: self.store.commit(step, parts))
        except SaveFailed as failure:
            self._failed(step, failure)
            return
        self.failure, self.failures = None, 0
        seconds = {"blocked": blocked, "write": written - started, "digest": digested - written}
        seconds["background"] = time.perf_counter() - started
        self.report("", event="saved", step=step, **{f"{name}_seconds": value for name, value in seconds.items()})
        try:
            self._clear_after()
        except self.store.failures as error:
            self.report(f"step {step} is saved, but clearing up failed: {error}", event="not_cleared", step=step)

    def _together(self, topic: str, work: Callable[[], object]):
        """Run a part of a save in every process; return this one's result. If one fails, all raise SaveFailed."""
        value = problem = None
        try:
            value = work()
        except self.store.failures as error:
            problem = " ".join(str(error).split())[:400] or type(error).__name__
            if isinstance(error, OSError) and error.strerror:  # of a full disk it often has no file
                problem = f"{error.filename or self.store.place}: {error.strerror}"
        for number, found in enumerate(processes.gather(topic, problem)):
            if found:
                raise SaveFailed(f"{processes.name(number)}: {found}" if processes.count() > 1 else found)
        return value

    def _clear_after(self) -> None:
        """Delete checkpoints by the retention policy, and the remains of earlier saves."""
        try:
            if processes.index() == 0 or not self.store.is_shared:
                steps = self.store.steps()
                for old in set(steps) - self.retention.reasons(steps, self.losses).keys():
                    self.store.remove(old)
            self.store.clear()
        finally:
            self.on_save()

    def _failed(self, step: int, failure: SaveFailed) -> None:
        self.failure, self.failures = failure, self.failures + 1
        self.store.discard(step)
        text = f"step {step} could not be saved: {failure}" + "; training goes on, and it is tried again" * self.goes_on
        self.report(text, event="save_failed", step=step, error=str(failure))


def _as_text(record: dict) -> str:
    return json.dumps(record | {"versions": identity.versions()})


def _lacking(held: list[set[int]], step: int) -> str:
    """Return the names of the processes that have no part of a checkpoint, and the verb "has" or "have"."""
    names = [processes.name(number) for number, steps in enumerate(held) if step not in steps]
    return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'}"
