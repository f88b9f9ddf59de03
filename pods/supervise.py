# SPDX-License-Identifier: Apache-2.0
"""Keeps a run going: when a worker dies or hangs, or the pod is taken away, all is started again from what was saved.

It ends with the run: 0 when every process finished, 2 or 3 when one ended so, which no restart mends, 75 when
`pod.py stop` or `delete` ended it, and 1 when the restarts without progress between them are used up.
"""

import dataclasses
import signal
import subprocess
import sys
import time

from pods import hosts, launch, records, watch
from pods.gcloud import NODE_AND_LOST
from pods.settings import Settings
from pods.transports import PodError, Transport, connect

FINAL = (2, 3)  # wrong configuration, loss not finite: it would end so again
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 600.0  # before a restart; doubled until there is progress
PROGRESS_STEPS = 5  # beyond the furthest so far
LOCAL_POLL_SECONDS = 1.0
UNREACHABLE_LOOKS = 3  # in a row; fewer may be the network's
ALERT_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a look comes to: the exit status to end with, or trouble that a restart may mend, or neither (all is well).

    `lost`: the pod itself is gone, and has to be created again.
    """

    end: int | None = None
    trouble: str = ""
    lost: bool = False


def supervise(settings: Settings, transport: Transport, rest: list[str]) -> int:
    """Watch what was launched last until it ends, and start it again where something ends it before.

    A pod that was taken away is created again with the flags that it was created with (--queued, --spot, ...).
    """
    if settings.dry_run:
        print("# dry run: would look at every worker, and stop and launch all again where one died")
        return 0
    record = records.read(settings)
    settings = _as_created(settings, record)
    supervisor = Supervisor(settings, connect(settings), record)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return supervisor.run()
    except KeyboardInterrupt:
        goes_on = "the run goes on, `stop` ends it"
        what = "amid a restart; `restart` starts the run again" if supervisor.recovering else goes_on
        print(f"no longer supervised; {what}", file=sys.stderr)
        return 130


class Supervisor:
    """One run being watched; counts restarts since the last progress."""

    def __init__(self, settings: Settings, transport: Transport, record: dict):
        self.settings, self.transport, self.record = settings, transport, record
        self.restarts, self.furthest, self.unreachable, self.blind = 0, 0, 0, 0
        self.mixed_since: float | None = None
        self.recovering = False
        given = settings.given("poll_seconds") or settings.transport != "local"
        self.poll_seconds = settings.poll_seconds if given else LOCAL_POLL_SECONDS

    def run(self) -> int:
        """Look, and act, until the run has ended; return the exit status."""
        print(
            f"supervising {self.settings.name}: {self.record['subcommand']}, run {self.record['workdir']}", flush=True
        )
        while True:
            verdict = self.look()
            if verdict.end is not None:
                if verdict.end:
                    self.alert(f"{self.settings.name}: {verdict.trouble}; not started again")
                if verdict.end in FINAL:
                    self.stop()
                print(f"the run has ended with status {verdict.end}", flush=True)
                return verdict.end
            self.recovering = bool(verdict.trouble)
            if verdict.trouble and not self.recover(verdict):
                return 1
            self.recovering = False
            time.sleep(self.poll_seconds)

    def look(self) -> Verdict:
        """Ask the pod and its workers."""
        if not records.launched(self.settings):
            return Verdict(end=watch.STOPPED, trouble="the pod was given back by `delete`")
        try:
            pod = self.transport.describe()
            if pod is None or pod.get("state") in NODE_AND_LOST:
                return Verdict(trouble=f"the pod is {pod['state'] if pod else 'gone'}", lost=True)
            workers = watch.look(self.settings, self.transport, self.record)
        except PodError as error:  # gcloud itself fails, which says nothing of the run
            print(f"could not look: {error}", file=sys.stderr, flush=True)
            self.blind += 1
            if self.blind == UNREACHABLE_LOOKS:
                self.alert(f"{self.settings.name}: nobody looks after the run, as gcloud fails: {error}")
            return Verdict()
        self.blind = 0
        self._note_progress(workers)
        return self.judge(workers)

    def judge(self, workers: list[watch.Worker]) -> Verdict:
        """Return what the workers' states come to."""
        ended = [worker for worker in workers if worker.reachable and not worker.alive]
        final = [worker for worker in ended if worker.status in FINAL]
        if final:
            return Verdict(end=final[0].status, trouble=final[0].how())
        if any(worker.stopped for worker in workers) and not all(worker.status == 0 for worker in workers):
            return Verdict(end=watch.STOPPED, trouble="the run was stopped by `stop`")
        died = sorted((worker for worker in workers if worker.died), key=_blame)
        if died:
            return Verdict(trouble=died[0].how())
        self.unreachable = self.unreachable + 1 if any(not worker.reachable for worker in workers) else 0
        if self.unreachable:
            first = next(worker for worker in workers if not worker.reachable)
            return Verdict(trouble=first.how() if self.unreachable >= UNREACHABLE_LOOKS else "")
        if len(ended) == len(workers):
            return self._all_ended(workers)
        hanging = [line for worker in workers if (line := watch.hangs(self.settings, worker))]
        hanging = [] if any(watch.builds(self.settings, worker) for worker in workers) else hanging
        return Verdict(trouble=hanging[0]) if hanging else self._some_ended(ended)

    def recover(self, verdict: Verdict) -> bool:
        """Start all again; False where the restarts are used up."""
        if self.restarts >= self.settings.max_restarts:
            self.alert(
                f"{self.settings.name}: {verdict.trouble}; given up after {self.restarts} restarts without progress"
            )
            self.stop()
            return False
        self.restarts += 1
        count = f"restart {self.restarts} of {self.settings.max_restarts}"
        self.alert(f"{self.settings.name}: {verdict.trouble}; {count} from the newest good checkpoint")
        time.sleep(min(FIRST_PAUSE_SECONDS * 2 ** (self.restarts - 1), LONGEST_PAUSE_SECONDS))
        if not records.launched(self.settings):  # given back meanwhile; the next look ends with it
            return True
        try:
            if verdict.lost:
                self.create_again()
            else:
                self.stop()
            record = self.record | {"time": time.time()}
            launch.start(self.settings, self.transport, record, unless_ended=True, anew=True)
        except PodError as error:  # the next look sees that nothing runs, and counts it
            print(f"restart failed: {error}", file=sys.stderr, flush=True)
        self.mixed_since = None
        return True

    def create_again(self) -> None:
        """Give back what is left of the pod, create it as before, wait for it and set it up."""
        for step in (self.transport.delete, self.transport.create, self.transport.wait):
            print(step(), flush=True)
        self.transport.put_code()

    def stop(self) -> None:
        """End what still runs."""
        try:
            self.transport.run(hosts.stop(self.settings, for_good=False))
        except PodError as error:
            print(f"stop: {error}", file=sys.stderr, flush=True)

    def alert(self, message: str) -> None:
        """Say it, and run the command of --alert with it; that this fails is said too, and ends nothing."""
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

    def _note_progress(self, workers: list[watch.Worker]) -> None:
        """Forget earlier restarts where the run has got further than ever."""
        step = max((worker.step or 0 for worker in workers), default=0)
        if step >= self.furthest + PROGRESS_STEPS:
            self.furthest, self.restarts = step, 0

    def _all_ended(self, workers: list[watch.Worker]) -> Verdict:
        if all(worker.status == 0 for worker in workers):
            return Verdict(end=0)
        return Verdict(trouble="all workers were interrupted" if any(w.launched for w in workers) else "nothing runs")

    def _some_ended(self, ended: list[watch.Worker]) -> Verdict:
        """Some end a little before the others; one that stays behind hangs."""
        if not ended:
            self.mixed_since = None
            return Verdict()
        self.mixed_since = self.mixed_since or time.monotonic()
        if time.monotonic() - self.mixed_since < self.settings.hang_seconds:
            return Verdict()
        numbers = ", ".join(str(worker.number) for worker in ended)
        return Verdict(trouble=f"workers {numbers} have ended and the others have not")


def _as_created(settings: Settings, record: dict) -> Settings:
    """Return the settings that the pod was created with, and the type and number of workers that it has."""
    settings = records.as_created(settings)
    pod = connect(settings).describe() or {}
    accel = pod.get("acceleratorType") or record["accelerator"]
    return dataclasses.replace(settings, accel=accel, workers=pod.get("workers", settings.workers))


def _blame(worker: watch.Worker) -> bool:
    """Sort first who was killed: the others ended because of it."""
    return worker.status is not None and worker.status <= watch.KILLED
