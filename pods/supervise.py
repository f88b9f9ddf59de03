# SPDX-License-Identifier: Apache-2.0
"""Restarts a run from its newest checkpoint if a worker dies or hangs, or if the pod is preempted.

It exits when the run ends, with one of these statuses:

    0     every process has finished
    2, 3  a process has ended with this status; a restart would end the same way; of a study, 1 and 2
    75    `pod.py stop` or `delete` was called
    1     the allowed restarts without progress are used up
"""

import dataclasses
import signal
import subprocess
import sys
import time

from pods import hosts, launch, records, studies, watch
from pods.calls import note
from pods.capacity import LASTING
from pods.connection import connect
from pods.errors import PodError, usage_error
from pods.gcloud import NODE_AND_LOST, NODE_AND_REPAIRED
from pods.settings import Settings
from pods.transports import Transport
from reporting.display import counted

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 600.0  # before a restart or a creation; doubled until it helps
PROGRESS_STEPS = 5  # steps beyond the furthest so far that count as progress
LOCAL_POLL_SECONDS = 1.0
UNREACHABLE_LOOKS = 3  # in a row; fewer may be a network failure
ALERT_SECONDS = 60.0
MAINTAINED = "UNHEALTHY_MAINTENANCE"  # health of a pod whose hosts Google maintains


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a check: an exit status to end with, trouble that a restart may fix, or neither (all is well).

    `lost`: the pod itself is gone and has to be created again.
    """

    end: int | None = None
    trouble: str = ""
    lost: bool = False


def supervise(settings: Settings, transport: Transport, rest: list[str]) -> int:
    """Watch the last launch until it ends, and restart it after an interruption.

    A preempted pod is created again with its original flags (--queued, --spot, ...).
    """
    if settings.dry_run:
        note(settings, "dry run: would check every worker, and restart all of them if one died")
        return 0
    record = records.read(settings)
    settings = _as_created(settings, record)
    supervisor = Supervisor(settings, connect(settings), record)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return supervisor.run()
    except KeyboardInterrupt:
        continues = "the run continues, `stop` ends it"
        what = "a restart was interrupted, `restart` starts the run again" if supervisor.recovering else continues
        print(f"no longer supervised; {what}", file=sys.stderr)
        return 130


class Supervisor:
    """Watches one run; counts restarts since the last progress."""

    def __init__(self, settings: Settings, transport: Transport, record: dict):
        self.settings, self.transport, self.record = settings, transport, record
        self.times = {record["time"]}  # of the launches that it knows
        self.restarts, self.furthest, self.unreachable, self.blind = 0, 0, 0, 0
        self.trial = ""  # of a study: the last that began
        self.mixed_since: float | None = None
        self.waiting_since: float | None = None  # for a pod that Google repairs or maintains
        self.recovering = False
        self.needs_code = False  # whether a pod was created or reimaged, and its code is not installed yet
        given = settings.given("poll_seconds") or settings.transport != "local"
        self.poll_seconds = settings.poll_seconds if given else LOCAL_POLL_SECONDS

    @property
    def final(self) -> tuple[int, ...]:
        """The exit statuses that a restart would not change."""
        return studies.FINAL if self.record.get("study") else hosts.FINAL

    def run(self) -> int:
        """Check and act until the run has ended; return the exit status."""
        print(f"supervising {self.settings.name}: {self.record['subcommand']}, {studies.what(self.record)}", flush=True)
        while True:
            verdict = self.look()
            if verdict.end is not None:
                if verdict.end:
                    self.alert(f"{self.settings.name}: {verdict.trouble}; it is not restarted")
                if verdict.end in self.final:
                    self.stop()
                print(f"the run has ended with status {verdict.end}", flush=True)
                return verdict.end
            self.recovering = bool(verdict.trouble)
            if verdict.trouble and not self.recover(verdict):
                return 1
            self.recovering = False
            time.sleep(self.poll_seconds)

    def look(self) -> Verdict:
        """Check the pod and its workers."""
        if not records.launched(self.settings):
            return Verdict(end=hosts.SAVED, trouble="the pod was deleted by `delete`")
        try:
            self.adopts_launch()
            pod = self.transport.describe()
            if pod is None or pod.get("state") in NODE_AND_LOST:
                return Verdict(trouble=f"the pod is {pod['state'] if pod else 'gone'}", lost=True)
            if pod.get("state") in NODE_AND_REPAIRED:
                self.needs_code |= pod["state"] == "REIMAGING"
                waits = self._waits(pod["state"])
                return Verdict(trouble="" if waits else f"the pod is still {pod['state']}", lost=not waits)
            record = studies.with_progress(self.settings, self.transport, self.record)
            workers = watch.look(self.settings, self.transport, record)
        except PodError as error:  # a failure of gcloud says nothing about the run
            print(f"the check failed: {error}", file=sys.stderr, flush=True)
            self.blind += 1
            if self.blind == UNREACHABLE_LOOKS:
                self.alert(f"{self.settings.name}: the run is unsupervised, because gcloud fails: {error}")
            return Verdict()
        self.blind = 0
        self._note_progress(workers, record["progress"]["trial"] if record.get("progress") else "")
        verdict = self.judge(workers)
        # At a maintenance notice all workers save and exit.
        saved = any(not worker.alive and worker.status == hosts.SAVED for worker in workers)
        absent = saved or any(not worker.reachable or worker.died for worker in workers)
        maintained = verdict.end is None and absent and pod.get("health") == MAINTAINED
        return Verdict() if self._waits(MAINTAINED if maintained else "") else verdict

    def judge(self, workers: list[watch.Worker]) -> Verdict:
        """Return the verdict on the workers' states."""
        ended = [worker for worker in workers if worker.reachable and not worker.alive]
        final = [worker for worker in ended if worker.status in self.final]
        if final:
            return Verdict(end=final[0].status, trouble=final[0].trouble())
        if any(worker.stopped for worker in workers) and not all(worker.status == 0 for worker in workers):
            return Verdict(end=hosts.SAVED, trouble="the run was stopped by `stop`")
        died = sorted((worker for worker in workers if worker.died), key=_blame)
        if died:
            return Verdict(trouble=died[0].trouble())
        self.unreachable = self.unreachable + 1 if any(not worker.reachable for worker in workers) else 0
        if self.unreachable:
            first = next(worker for worker in workers if not worker.reachable)
            return Verdict(trouble=first.trouble() if self.unreachable >= UNREACHABLE_LOOKS else "")
        if len(ended) == len(workers):
            return self._all_ended(workers)
        hanging = [line for worker in workers if (line := watch.hangs(self.settings, worker))]
        hanging = [] if any(watch.builds(self.settings, worker) for worker in workers) else hanging
        return Verdict(trouble=hanging[0]) if hanging else self._some_ended(ended)

    def recover(self, verdict: Verdict) -> bool:
        """Restart the run; return False if the restarts are used up."""
        if self.restarts >= self.settings.max_restarts:
            count = f"{counted(self.restarts, 'restart')} without progress"
            self.alert(f"{self.settings.name}: {verdict.trouble}; supervise gives up after {count}")
            self.stop()
            return False
        self.restarts += 1
        count = f"restart {self.restarts} of {self.settings.max_restarts}"
        self.alert(f"{self.settings.name}: {verdict.trouble}; {count} from the newest good checkpoint")
        time.sleep(_pause(self.restarts))
        try:
            if not records.launched(self.settings) or self.adopts_launch():  # meanwhile; the next check looks again
                return True
            if verdict.lost:
                self.create_again()
            else:
                self.stop()
            if self.needs_code:
                self.transport.put_code()
                self.needs_code = False
            record = self.record | {"time": time.time()}
            self.times.add(record["time"])
            launch.start(self.settings, self.transport, record, unless_ended=True, was_stopped=True)
        except (PodError, OSError) as error:  # the next check sees that nothing runs, and counts it
            print(f"restart failed: {error}", file=sys.stderr, flush=True)
        self.mixed_since = None
        return True

    def adopts_launch(self) -> bool:
        """Return whether `launch` or `restart` was called in another terminal since the last call, and supervise that.

        The count of restarts begins again for another program.
        """
        record = records.read(self.settings)
        if record["time"] in self.times:
            return False
        self.times.add(record["time"])
        print(f"launched meanwhile: {record['subcommand']}, {studies.what(record)}", flush=True)
        if record | {"time": 0} != self.record | {"time": 0}:
            self.restarts, self.furthest, self.trial = 0, 0, ""
        self.record = record
        return True

    def create_again(self) -> None:
        """Delete the rest of the pod, create it as before and wait for it; try again while there is no capacity.

        A pod that was created meanwhile is kept. PodError after wait_seconds, for a failure that another try does not
        change, and after `delete`.
        """
        self.needs_code = True
        end, tries = time.monotonic() + self.settings.wait_seconds, 0
        while True:
            try:
                pod = self.transport.describe() if tries else None
                if pod is None or pod.get("state") in NODE_AND_LOST:
                    print(self.transport.delete().line, flush=True)
                for step in (self.transport.create, self.transport.wait):
                    print(step(), flush=True)
                self.waiting_since = None
                if records.launched(self.settings):
                    return
                print(self.transport.delete().line, flush=True)  # nobody would watch it
            except PodError as error:
                tries += 1
                if error.exit_status == 2 or LASTING.search(str(error)) or time.monotonic() + _pause(tries) > end:
                    raise
                print(f"no pod yet: {error}; next try in {_pause(tries):.0f} s", file=sys.stderr, flush=True)
            time.sleep(_pause(tries))
            if not records.launched(self.settings):
                raise PodError("the pod was deleted by `delete`")

    def stop(self) -> None:
        """Stop all programs that still run."""
        try:
            self.transport.run(hosts.stop(self.settings, for_good=False))
        except PodError as error:
            print(f"stop: {error}", file=sys.stderr, flush=True)

    def alert(self, message: str) -> None:
        """Print a message and pass it to the command of --alert; if that fails, print so and continue."""
        print(f"ALERT: {message}", file=sys.stderr, flush=True)
        if not self.settings.alert:
            return
        try:
            command = ["sh", "-c", f'{self.settings.alert} "$0"', message]
            status = subprocess.run(command, timeout=ALERT_SECONDS, stdin=subprocess.DEVNULL).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            status = str(error)
        if status:
            print(f"--alert={self.settings.alert} failed: {status}", file=sys.stderr, flush=True)

    def _waits(self, now: str) -> bool:
        """Return whether to wait for a pod that is `now` repaired or maintained ("": neither), at most wait_seconds."""
        if not now:
            self.waiting_since = None
            return False
        if self.waiting_since is None:
            self.waiting_since = time.monotonic()
            self.alert(f"{self.settings.name}: the pod is {now}; waiting until it is READY")
        if time.monotonic() - self.waiting_since >= self.settings.wait_seconds:
            return False
        self.blind, self.unreachable, self.mixed_since = 0, 0, None
        return True

    def _note_progress(self, workers: list[watch.Worker], trial: str) -> None:
        """Reset the count of restarts if the run got further than before, or the study began another trial."""
        if trial not in ("", self.trial):
            self.trial, self.furthest, self.restarts = trial, 0, 0
        step = max((worker.step or 0 for worker in workers), default=0)
        if step >= self.furthest + PROGRESS_STEPS:
            self.furthest, self.restarts = step, 0

    def _all_ended(self, workers: list[watch.Worker]) -> Verdict:
        if all(worker.status == 0 for worker in workers):
            return Verdict(end=0)
        return Verdict(trouble="all workers were interrupted" if any(w.launched for w in workers) else "nothing runs")

    def _some_ended(self, ended: list[watch.Worker]) -> Verdict:
        """Return the verdict if some workers have ended: it is trouble if the others do not end soon."""
        if not ended:
            self.mixed_since = None
            return Verdict()
        self.mixed_since = self.mixed_since or time.monotonic()
        if time.monotonic() - self.mixed_since < self.settings.hang_seconds:
            return Verdict()
        numbers = ", ".join(str(worker.number) for worker in ended)
        who = f"worker {numbers} has" if len(ended) == 1 else f"workers {numbers} have"
        return Verdict(trouble=f"{who} ended and the others have not")


def _pause(tries: int) -> float:
    """Return the seconds to wait after a number of tries."""
    return min(FIRST_PAUSE_SECONDS * 2 ** min(tries - 1, 30), LONGEST_PAUSE_SECONDS)


def _as_created(settings: Settings, record: dict) -> Settings:
    """Return the settings of the pod's creation, with its actual type and number of workers.

    Another zone or project than the pod's is a usage error: there the pod would seem to be gone and be created again.
    """
    here, settings = settings, records.as_created(settings)
    places = ("zone", settings.zone, here.zone), ("project", settings.project, here.project)
    for name, there, given in places:
        if there != given and here.transport != "local":
            raise usage_error(
                f"{here.name} was created with {name.upper()}={there}, but here {name.upper()}={given}; type "
                f"--{name}={there}, or --{name}={given} if it was created again"
            )
    pod = connect(settings).describe() or {}
    accel = pod.get("acceleratorType") or record["accelerator"]
    return dataclasses.replace(settings, accel=accel, workers=pod.get("workers", settings.workers))


def _blame(worker: watch.Worker) -> bool:
    """Return a sort key that puts killed workers first: the others ended because of them."""
    return worker.status is not None and worker.status <= watch.KILLED
