# SPDX-License-Identifier: Apache-2.0
"""Which phase a process is in and how long it was in each; and what is done every so often meanwhile."""

import contextlib
import threading
import time
from collections.abc import Callable

# What a process does; each ends when the next begins. "wait" is for the devices, after "step" gave them their work.
PHASES = ("start_up", "compile", "data", "step", "wait", "evaluation", "save")
OF_STEPS = ("data", "step", "wait")
END_SECONDS = 5.0  # that a thread has to end


class Repeated:
    """Calls a function in a thread every so many seconds until the end."""

    def __init__(self, name: str, call: Callable[[], None], seconds: float):
        self.call, self.seconds, self.over = call, seconds, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True, name=name)
        self.thread.start()

    def end(self) -> None:
        """Call it no more; wait for END_SECONDS at most, in case that it hangs."""
        self.over.set()
        self.thread.join(END_SECONDS)

    def _run(self) -> None:
        while not self.over.wait(self.seconds):
            self.call()


class Clock:
    """Which phase this process is in, since when, and how long it was in each.

    Attributes, which other threads may read:
      phase, step: what is done now, and for which step.
      since: time.monotonic() when it began.
      doing: what takes long in it and gets on, in words; "": nothing that is known to.
      last_progress: time.monotonic() when it began or last got on.
      number: how many phases have begun. All processes of a run go through the same ones, so who has the smallest
        number is behind.
      seconds: {phase: seconds}, without the present one's.
      on_enter: called with (phase, step) as each begins.
    """

    def __init__(self, started: float):
        """Begin in "start_up", which began at `started`, as time.monotonic()."""
        self.phase, self.step, self.since, self.number = "start_up", 0, started, 0
        self.doing, self.last_progress = "", started
        self.seconds, self.lock = dict.fromkeys(PHASES, 0.0), threading.Lock()
        self.on_enter: Callable[[str, int], None] = lambda phase, step: None

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begin a phase, or the next part of the same one."""
        with self.lock:
            now = time.monotonic()
            self.seconds[self.phase] += now - self.since
            self.phase, self.since, self.number = phase, now, self.number + 1
            self.doing, self.last_progress = "", now
            self.step = self.step if step is None else step
        self.on_enter(phase, self.step)

    def progress(self, doing: str) -> None:
        """Note that what takes long in this phase gets on; from any thread."""
        with self.lock:
            self.doing, self.last_progress = doing, time.monotonic()

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
