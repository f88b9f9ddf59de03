# SPDX-License-Identifier: Apache-2.0
"""A worker: a process that claims trials, runs train.py for each, and records how it ended.

`sweep.py run` starts it with its Task as JSON on standard input. Its children end with its main thread, which starts
them.
"""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TypeVar

from optuna.trial import FrozenTrial

from checkpointing.bucket import failures_of, kind_of, path_of
from cluster import identity
from cluster.hub import RunError
from cluster.parent import end_with
from configs.errors import ConfigError
from core import ending
from files.folders import names_in
from files.lock import is_held
from settings import stored_config
from settings.stored_config import SUMMARY
from studies import outcome, program, progress, trials
from studies.claims import BEAT_SECONDS, STALE_SECONDS
from studies.cost import budget, retention
from studies.cost.limits import Limits
from studies.mismatch import TRIAL, edited_recipe, other_run_in_folder
from studies.storage import OutOfReach, open_storage, reaching

DONE, USAGE, INTERRUPTED = 0, 2, 75  # exit statuses of train.py
LOOK_SECONDS = 0.2  # between two looks at the process of a trial
IDLE_SECONDS = 2.0  # between two looks at the queue while others run the last trials
LOCK_SECONDS = 60.0  # that the process of a killed worker has to let go of the trial's folder
OUTAGE_SECONDS = 1800.0  # that the storage of a trial's folder has to answer again
OUTPUT = "output.txt"  # what train.py printed, in the trial's folder
Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True)
class Task:
    """What a worker does."""

    storage: str  # URL of the queue's database
    study: str
    digests: list[str]  # of the configurations that it runs
    metric: str  # figure of an evaluation that is a trial's value
    program: list[str]  # the command of a trial, before its flags
    limits: Limits = dataclasses.field(default_factory=Limits)  # of chip-hours and of disk
    root: str = ""  # folder of the study's trials and progress; "": it is not written, and no checkpoint is deleted


class Worker:
    """Runs trials until none of its task is left, or until it is asked to stop."""

    beat_seconds = BEAT_SECONDS  # between two looks at whether a running trial should end; each also keeps its claim

    def __init__(self, task: Task):
        self.task, self._asked_to_stop, self._began = task, False, None
        self.queue = trials.Queue(open_storage(task.storage, create=False, is_known=True), task.study, create=False)

    def run(self) -> None:
        """Claim and run trials; return when all have ended, wherever they ran, or after `stop`."""
        while not self.asked_to_stop:
            if trial := self.next_trial():
                with contextlib.suppress(trials.LostClaim):
                    self.run_trial(trial)
            elif self.is_over():
                break
            else:
                self._pause(IDLE_SECONDS)
        self._write_progress(None)

    def next_trial(self) -> FrozenTrial | None:
        """Return a trial that this worker holds from now on; None if there is none now."""
        digests, limits = set(self.task.digests), self.task.limits
        if limits.budget is None:
            return self.queue.claim_next(digests)
        trial = budget.claim_next(self.queue, digests, limits)
        if trial and budget.account(self.queue, limits).is_measuring:
            say(f"{trials.title(trial)}: its chip-hours are not known; it runs alone to measure them")
        return trial

    def is_over(self) -> bool:
        """Return whether all trials have ended, or the budget ends the queue."""
        if all(trial.state.is_finished() for trial in self.own_trials()):
            return True
        return bool(budget.reason_to_end(self.queue, set(self.task.digests), self.task.limits, waits=True))

    def own_trials(self) -> list[FrozenTrial]:
        """Return the last trial of each configuration of the task."""
        return [trial for digest, trial in self.queue.latest().items() if digest in self.task.digests]

    def reason_to_end(self, trial: FrozenTrial) -> str:
        """Return why a running trial should end before its time, "" if it should not. Raises LostClaim."""
        cancelled, limits = self.queue.keep(trial), self.task.limits
        self.queue.set_attribute(trial, trials.RAN_SECONDS, self._ran_seconds(trial))  # this worker may be killed
        if limits.budget is not None and not self.asked_to_stop and budget.spent(self.queue) >= limits.budget:
            say(f"{trials.title(trial)} saves and stops: the budget of {limits.budget:,.2f} chip-hours is spent")
            self.stop()
        return trials.CANCELLED if cancelled else ""

    @property
    def count(self) -> int:
        """The number of trials in all."""
        return len(self.task.digests)

    @property
    def asked_to_stop(self) -> bool:
        """Whether an end was asked for."""
        return self._asked_to_stop

    def stop(self, *_) -> None:
        """Ask for an end: the running process saves, and its trial goes back to the queue."""
        self._asked_to_stop = True

    def run_trial(self, trial: FrozenTrial) -> None:
        """Run the process of a claimed trial to its end, and record it. Raises LostClaim."""
        workdir, before = trial.user_attrs["workdir"], self._step(trial)
        self._wait_for_folder(trial)
        has_finished = before is None and self._reach(trial, lambda: SUMMARY in names_in(path_of(workdir)))
        has_run = before is not None or has_finished
        if not has_run:
            with self.queue.kept(trial):  # a recipe may take long
                reason = edited_recipe(trial)
            if reason:
                self._began = None  # no process ran
                self._give_back(trial)
                raise ConfigError(f"{reason}; undo the edit and give the same command again, or give another --name")
        elif reason := self._reach(trial, lambda: other_run_in_folder(trial)):
            nothing = outcome.Outcome([], 0.0, outcome.chips_of(trial.user_attrs["topology"]), None, 0.0, "", None, 0.0)
            return self.end(trial, None, {"status": USAGE, "reason": reason}, nothing)
        if has_finished:  # its checkpoints were deleted by `keep`, and the database that recorded it is lost
            self._began = None
            with self.queue.kept(trial):
                return self._complete(trial)
        if before is None:
            self._reach(trial, lambda: progress.write_json(workdir, TRIAL, trial.user_attrs["config"]))
        self._write_progress(trial)
        self._began = time.monotonic()
        with output_of(workdir) as output:
            began = output.tell()
            status, ended_for = self.attempt(trial, output)
            output.seek(began)
            reason = reason_of(status, output.read())
        stopped = self.asked_to_stop and status in (INTERRUPTED, -signal.SIGTERM)  # by the signal if it only began
        with self.queue.kept(trial):  # to read and to store a long record takes minutes
            if status == DONE:  # also if it was to end early, and had no step left
                self._complete(trial)
            elif ended_for:
                self.end_early(trial, {"status": status, "reason": ended_for})
            elif stopped or (status == INTERRUPTED and self._step(trial) != before):
                self._give_back(trial)
            else:
                self._fail(trial, {"status": status, "reason": reason})

    def end_early(self, trial: FrozenTrial, how: dict) -> None:
        """Record a trial that ended for a `reason_to_end`."""
        self.end(trial, None, how)

    def attempt(self, trial: FrozenTrial, output) -> tuple[int, str]:
        """Return (exit status, why it was ended before its time or "") of a process of the trial."""
        process = program.start(program.command_of(trial.user_attrs, self.task.program), output)
        beaten, ended_for, terminated = time.monotonic(), "", False
        try:
            while process.poll() is None:
                if (self.asked_to_stop or ended_for) and not terminated:
                    process.terminate()  # once: it then saves, and a second signal would end it at once
                    terminated = True
                if time.monotonic() - beaten > self.beat_seconds:
                    reason = self._beat(trial, beaten)  # also while it saves, to keep the claim
                    ended_for = ended_for or reason
                    beaten = time.monotonic()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_SECONDS)
        finally:
            process.kill()
            process.wait()
        return process.returncode, ended_for

    def _ran_seconds(self, trial: FrozenTrial) -> float:
        """Return how long processes of the present trial have run, over all attempts."""
        now = 0.0 if self._began is None else time.monotonic() - self._began
        return trial.user_attrs.get(trials.RAN_SECONDS, 0.0) + now

    def _give_back(self, trial: FrozenTrial, failure: dict | None = None) -> None:
        """Return a trial to the queue; see `Queue.give_back`."""
        self.queue.keep(trial)
        self.queue.set_attribute(trial, trials.RAN_SECONDS, self._ran_seconds(trial))
        self.queue.give_back(trial, failure)

    def _beat(self, trial: FrozenTrial, beaten: float) -> str:
        """Return the `reason_to_end`; if the database cannot be reached, try again."""
        while True:
            try:
                with reaching():
                    return self.reason_to_end(trial)
            except OutOfReach as error:
                if time.monotonic() - beaten > STALE_SECONDS / 2:
                    raise trials.LostClaim(str(error)) from error
                time.sleep(1.0)

    def _complete(self, trial: FrozenTrial) -> None:
        found = self._outcome(trial)
        curve = found.curve(self.task.metric)
        last = found.evaluations[-1]["step"] if found.evaluations else None
        if last not in curve:
            reason = f"{trial.user_attrs['workdir']}/metrics.jsonl has no finite {self.task.metric} at its end"
            self.end(trial, None, {"status": DONE, "reason": reason}, found)
        else:
            self.end(trial, curve[last], {"status": DONE, "reason": "finished"}, found)
            affected = retention.affected(trial.user_attrs["digest"], self.task.limits) & set(self.task.digests)
            for line in retention.enforce(self.queue, affected, self.task.limits, self.task.root):
                say(line)

    def _fail(self, trial: FrozenTrial, failure: dict) -> None:
        """Return a failed trial to the queue, or end it if the retries are used up or could not help."""
        if failure["status"] != USAGE and len(trial.user_attrs["failures"]) < trials.RETRIES:
            self._give_back(trial, failure)
            say(f"{trials.title(trial)} failed with status {failure['status']}, is tried again: {failure['reason']}")
        else:
            self.end(trial, None, failure)

    def _outcome(self, trial: FrozenTrial) -> outcome.Outcome:
        about = trial.user_attrs
        ran, before = self._ran_seconds(trial), about.get(trials.RAN_BEFORE, 0.0)
        price = self.task.limits.price
        return self._reach(
            trial, lambda: outcome.read(about["workdir"], about["topology"], ran, price, ran_before=before)
        )

    def end(
        self, trial: FrozenTrial, value: float | None, how: dict, found: outcome.Outcome | None = None, *,
        pruned: bool = False,
    ) -> None:  # fmt: skip
        """End a trial with the figures of its folder, `found` if they were read already; see `Queue.finish`."""
        found = found or self._outcome(trial)
        results = dataclasses.asdict(found) | {"chip_hours": found.chip_hours} | how
        results |= {"code": identity.code_digest(), "worker": self.queue.claims.worker}
        self.queue.finish(trial, value, results, found.curve(self.task.metric), pruned=pruned)
        if value is not None:
            said = f"{'pruned' if pruned else 'done'}, {self.task.metric} {value:.6g}"
        else:
            said = how["reason"] if how["reason"] == trials.CANCELLED else f"failed, {how['reason']}"
        say(f"{trials.title(trial)}: {said}")

    def _write_progress(self, running: FrozenTrial | None) -> None:
        if self.task.root:
            progress.write(self.task.root, self.own_trials(), running, self.count)

    def _step(self, trial: FrozenTrial) -> int | None:
        return self._reach(trial, lambda: stored_config.trained_to(path_of(trial.user_attrs["workdir"])))

    def _reach(self, trial: FrozenTrial, act: Callable[[], Found]) -> Found:
        """Return what `act` does with the trial's folder. If its storage does not answer, ask again for a while.

        Raises LostClaim; ConfigError for an error that the user must fix; and RunError if the storage does not answer
        within OUTAGE_SECONDS, or before `stop`.
        """
        workdir, failed = trial.user_attrs["workdir"], None
        while True:
            try:
                return act()
            except failures_of(workdir) as error:
                if kind_of(error) is ConfigError or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
                    raise ConfigError(f"{workdir}: {error}") from None
                if failed is None:
                    failed = time.monotonic()
                    say(f"{trials.title(trial)}: {workdir} does not answer and is asked again: {error}")
                if self.asked_to_stop or time.monotonic() - failed > OUTAGE_SECONDS:
                    raise RunError(f"{workdir}: {error}; run the same command to continue") from None
            self.queue.keep(trial)
            self._pause(self.beat_seconds)

    def _wait_for_folder(self, trial: FrozenTrial) -> None:
        """Wait until no process holds the trial's folder: that of a killed worker needs a moment to end."""
        lock, began = pathlib.Path(trial.user_attrs["workdir"]) / "lock", time.monotonic()
        while is_held(lock) and time.monotonic() - began < LOCK_SECONDS:
            self.queue.keep(trial)
            time.sleep(LOOK_SECONDS)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.asked_to_stop and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)


@contextlib.contextmanager
def output_of(workdir: str):
    """Open the file to which a trial's output is appended: OUTPUT in its folder, or a copy if that is in a bucket.

    The copy is written to the bucket when the file is closed. If the bucket cannot be reached, the trial still runs.
    """
    if "://" in workdir:
        stored, failures = path_of(f"{workdir}/{OUTPUT}"), failures_of(workdir)
        with tempfile.TemporaryFile() as file:
            with contextlib.suppress(*failures):
                file.write(stored.read_bytes())
            file.flush()  # the trial's process continues where this one has written to
            yield file
            file.seek(0)
            with contextlib.suppress(*failures):
                stored.write_bytes(file.read())
        return
    path = pathlib.Path(workdir)
    path.mkdir(parents=True, exist_ok=True)
    with (path / OUTPUT).open("ab+") as file:
        file.seek(0, os.SEEK_END)
        yield file


def reason_of(status: int, output: bytes) -> str:
    """Return why a process failed: the last line that it printed, else how it ended."""
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    if lines:
        return lines[-1].strip()[:500]
    return f"ended by signal {-status}" if status < 0 else "it printed nothing"


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def task_of(content: dict) -> Task:
    """Return the task of a JSON object."""
    return Task(**content | {"limits": Limits(**content["limits"])})


def main(make: Callable[[dict], Worker] = lambda content: Worker(task_of(content))) -> None:
    """Run the worker that the JSON on standard input describes; end with the process that started this one."""
    ending.install()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # until there is a worker to stop
    content = json.load(sys.stdin)
    end_with(content.pop("parent"))
    with reaching():
        worker = make(content)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, worker.stop)
        worker.run()


if __name__ == "__main__":
    main()
