# SPDX-License-Identifier: Apache-2.0
"""Books every second of a run to what it was spent on, across restarts."""

import contextlib
import threading
import time
from collections.abc import Callable

# What a process does; each ends when the next begins. "wait" is for the devices, after "step" gave them their work.
PHASES = ("start_up", "compile", "data", "step", "wait", "evaluation", "save")
OF_STEPS = ("data", "step", "wait")
PARTS = {  # of the wall-clock time, in the words of the summary; what the phases come to
    "start_up": ("start_up",),
    "compile": ("compile",),
    "training": ("step", "wait"),
    "data": ("data",),
    "evaluation": ("evaluation",),
    "checkpoint": ("save",),
    "lost": (),  # training that a restart did again
    "idle": (),  # between two processes
}


class Clock:
    """Which phase this process is in, since when, and how long it was in each.

    Attributes, which other threads may read:
      phase, step: what is done now, and for which step.
      since: time.monotonic() when it began.
      number: how many phases have begun. All processes of a run go through the same ones, so who has the smallest
        number is behind.
      seconds: {phase: seconds}, without the present one's.
      on_enter: called with (phase, step) as each begins.
    """

    def __init__(self, started: float):
        """Begin in "start_up", which began at `started`, as time.monotonic()."""
        self.phase, self.step, self.since, self.number = "start_up", 0, started, 0
        self.seconds, self.lock = dict.fromkeys(PHASES, 0.0), threading.Lock()
        self.on_enter: Callable[[str, int], None] = lambda phase, step: None

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begin a phase, or the next part of the same one."""
        with self.lock:
            now = time.monotonic()
            self.seconds[self.phase] += now - self.since
            self.phase, self.since, self.number = phase, now, self.number + 1
            self.step = self.step if step is None else step
        self.on_enter(phase, self.step)

    @contextlib.contextmanager
    def within(self, phase: str):
        """Be in a phase for the time of the block, and then again in the one before."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase up to now."""
        with self.lock:
            return self.seconds | {self.phase: self.seconds[self.phase] + time.monotonic() - self.since}
