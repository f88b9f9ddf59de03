# SPDX-License-Identifier: Apache-2.0
"""Looks every second whether the run gets on: tells the others and `pod.py status`, names who holds it up, ends a hang.

What must not wait and what writes files are in threads of their own: writing may hang with the file system.
"""

import contextlib
import faulthandler
import json
import os
import pathlib
import socket
import threading
import time

from parallelism import identity, processes
from parallelism.blame import Judge, Sign
from parallelism.hub import RunError
from training.clock import END_SECONDS, Clock, Repeated
from training.step_log import StepLog
from training.throughput import device_memory_gib, host_memory_gib
from training.workdir import write_atomically

INTERVAL_SECONDS = 1.0
START_SECONDS = 900.0  # at least, before the first step has begun: restoring and compiling
IN_WORDS = {  # of pods/watch.py, for which a worker hangs that has been "training" for too long
    "start_up": "compiling", "compile": "compiling", "data": "training", "step": "training", "wait": "training",
    "save": "training", "evaluation": "evaluating",
}  # fmt: skip
BUILDING = "building"  # in any phase, while data that was lost is built again, and that gets on


@contextlib.contextmanager
def watchdog(clock: Clock, seconds: float, log: pathlib.Path):
    """Within the block, give signs of life to the other processes, and let no phase, or part of one, take `seconds`.

    What is known to get on may take longer, and so may what waits for a process of which that is known. Before the
    first step has begun START_SECONDS are allowed; 0: there is no limit. Beyond it the stacks of all threads are
    written to the end of `log`, and RunError, which names who is to blame, is raised in a thread of its own, whose
    excepthook is to end the process.
    """

    def look() -> None:
        own = _sign(clock)
        processes.sign(own)
        allowed = seconds if clock.seconds["wait"] else max(seconds, START_SECONDS)
        if seconds and own.idle > allowed and (to_blame := processes.blame(own, allowed)):
            _keep_stacks(log)
            raise RunError(f"no step ended for {allowed:g} s: {to_blame}; where every thread was is in {log}")

    thread = Repeated("watchdog", look, INTERVAL_SECONDS)
    try:
        yield
    finally:
        thread.end()
        processes.sign(None)


class Heartbeat:
    """Within the block, keeps WORKDIR/workers/<process>.json fresh; in process 0, tells who holds up the run.

    It goes into the block of a watchdog, whose signs of life it judges. The file has `phase` in the words of
    IN_WORDS, the `time` when that began (Unix seconds), and the `phase_seconds` from then until it was written; while
    it is BUILDING, both are of when that last got on.
    """

    def __init__(self, workdir: pathlib.Path, log: StepLog):
        """`log`: of the run, which knows the last step and the account of time, and is told who holds up the others."""
        self.clock, self.log, self.judge = log.goodput.clock, log, Judge()
        self.path = workdir / "workers" / f"{processes.index()}.json"
        self.constant = {
            "process": processes.index(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "code": identity.code_digest(),
        }

    def __enter__(self):
        self._write()
        self.thread = Repeated("heartbeat", self._beat, INTERVAL_SECONDS)
        return self

    def __exit__(self, kind, *unused):
        self.thread.end()
        self._write("stopped" if kind else "finished")

    def _beat(self) -> None:
        self._write()
        if processes.index() == 0:
            for found in self.judge.look(processes.signs(_sign(self.clock))):
                with contextlib.suppress(OSError):
                    self.log.event(found.text, "blame", **found.figures())

    def _write(self, last: str = "") -> None:
        """Write the file, in the phase `last` where that is given; a full disk or a lost folder ends no run."""
        building = bool(self.clock.doing) and not last
        here = 0.0 if last else time.monotonic() - (self.clock.got_on if building else self.clock.since)
        line = self.constant | {
            "step": self.log.last_step,
            "phase": last or (BUILDING if building else IN_WORDS[self.clock.phase]),
            "time": time.time() - here,
            "phase_seconds": here,
            "seconds": self.log.goodput.record(),
            "host_memory_gib": host_memory_gib()[0],
            "device_memory_gib": device_memory_gib(),
        }
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(line).encode())


def _sign(clock: Clock) -> Sign:
    return Sign(
        processes.index(), socket.gethostname(), clock.phase, clock.step, clock.number,
        phase_seconds=time.monotonic() - clock.since, seconds=clock.read(), doing=clock.doing,
        idle_seconds=time.monotonic() - clock.got_on,
    )  # fmt: skip


def _keep_stacks(log: pathlib.Path) -> None:
    """Append the stacks of all threads to a file; in a thread, since the file system may be what hangs."""

    def write() -> None:
        with contextlib.suppress(OSError):
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a") as file:
                faulthandler.dump_traceback(file, all_threads=True)

    thread = threading.Thread(target=write, daemon=True, name="stacks")
    thread.start()
    thread.join(END_SECONDS)
