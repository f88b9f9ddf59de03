# SPDX-License-Identifier: Apache-2.0
"""Check every second that the run makes progress: send heartbeats, report a process that blocks it, end a hang.

Heartbeats to the other processes and writes to files have separate threads: a write may hang with the file system.
"""

import contextlib
import json
import os
import pathlib
import socket
import time

from cluster import identity, processes
from cluster.blame import Heartbeat, Judge
from cluster.hub import RunError
from files import stacks
from files.atomic import write_atomically
from reporting.clock import Clock, Repeated
from reporting.sink import is_interruption
from reporting.step_log import StepLog
from reporting.throughput import device_memory_gib, device_peak_gib, host_memory_gib

INTERVAL_SECONDS = 1.0
START_SECONDS = 900.0  # allowed at least before the first step, to restore and compile
IN_WORDS = {  # of pods/watch.py, whose PATIENCE says how long some of them may last
    "start_up": "compiling", "compile": "compiling", "data": "training", "step": "training", "wait": "training",
    "rollout": "sampling", "save": "saving", "evaluation": "evaluating", "profile": "profiling",
}  # fmt: skip
BUILDING = "building"  # in any phase, while lost data is being rebuilt


@contextlib.contextmanager
def watchdog(clock: Clock, seconds: float, log: pathlib.Path):
    """Within the block, send heartbeats, and end the process if a phase makes no progress for `seconds`.

    Work that reports progress may take longer; so may a process that waits for such work. At least START_SECONDS are
    allowed before the first step. With 0 there is no limit. At the limit the stacks of all threads are appended to
    `log`. Then RunError, which names the process to blame, is raised in a separate thread; its excepthook must end the
    process.
    """

    def look() -> None:
        own = _heartbeat(clock)
        processes.send_heartbeat(own)
        allowed = seconds if clock.seconds["wait"] else max(seconds, START_SECONDS)
        if seconds and own.idle > allowed and (to_blame := processes.blame(own, allowed)):
            stacks.append(log)
            raise RunError(f"no step ended within {allowed:g} s: {to_blame}; {log} has the stacks of all threads")

    thread = Repeated("watchdog", look, INTERVAL_SECONDS)
    try:
        yield
    finally:
        thread.end()
        processes.send_heartbeat(None)


class HeartbeatFile:
    """Within the block, keep WORKDIR/workers/<process>.json fresh; in process 0, report who blocks the run.

    Use it inside the block of a watchdog, whose heartbeats it judges. The file has `phase` in the words of IN_WORDS,
    the `time` when the phase began (Unix seconds), and `phase_seconds` from then until the write. While the phase is
    BUILDING, both count from the last progress.
    """

    def __init__(self, workdir: pathlib.Path, log: StepLog):
        """Use `log` of the run for the last step and the account of time, and to report who blocks the run."""
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

    def __exit__(self, kind, error, trace):
        self.thread.end()
        self._write("finished" if error is None else "stopped" if is_interruption(error) else "failed")

    def _beat(self) -> None:
        self._write()
        if processes.index() == 0:
            for found in self.judge.look(processes.heartbeats(_heartbeat(self.clock))):
                with contextlib.suppress(OSError):
                    self.log.event(found.text, "blame", **found.figures())

    def _write(self, last: str = "") -> None:
        """Write the file, with the phase `last` if it is given; a full disk or a lost folder does not end the run."""
        building = bool(self.clock.doing) and not last
        here = 0.0 if last else time.monotonic() - (self.clock.last_progress if building else self.clock.since)
        line = self.constant | {
            "step": self.log.last_step,
            "phase": last or (BUILDING if building else IN_WORDS[self.clock.phase]),
            "time": time.time() - here,
            "phase_seconds": here,
            "seconds": self.log.goodput.record(),
            "host_memory_gib": host_memory_gib()[0],
            "device_memory_gib": device_memory_gib(),
            "device_memory_peak_gib": device_peak_gib(),
        }
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(line).encode())


def _heartbeat(clock: Clock) -> Heartbeat:
    return Heartbeat(
        processes.index(), socket.gethostname(), clock.phase, clock.step, clock.number,
        phase_seconds=time.monotonic() - clock.since, seconds=clock.read(), doing=clock.doing,
        idle_seconds=time.monotonic() - clock.last_progress,
    )  # fmt: skip
