# SPDX-License-Identifier: Apache-2.0
"""Track the phase of a process and the time in each phase; call functions periodically."""

import contextlib
import threading
import time
from collections.abc import Callable

# Phases of a process; each ends when the next begins. "rollout" samples the batch of a step, "step" dispatches work to
# the devices, and "wait" waits for them. "profile" summarises a trace.
PHASES = ("start_up", "compile", "data", "rollout", "step", "wait", "evaluation", "save", "profile")
OF_STEPS = ("data", "rollout", "step", "wait")
END_SECONDS = 5.0  # that a thread has to end

# A clock that also counts while the machine sleeps. macOS lacks the first name; its CLOCK_MONOTONIC counts then too.
STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BEGAN = time.time() - time.clock_gettime(STEADY)


def steady_time() -> float:
    """Return Unix seconds that do not jump within a process, even if its wall clock is set."""
    return _BEGAN + time.clock_gettime(STEADY)


class Repeated:
    """Call a function in a thread every `seconds` seconds, until `end`."""

    def __init__(self, name: str, call: Callable[[], None], seconds: float):
        self.call, self.seconds, self.over = call, seconds, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True, name=name)
        self.thread.start()

    def end(self) -> None:
        """Stop; wait for the thread for at most END_SECONDS, since it may hang."""
        self.over.set()
        self.thread.join(END_SECONDS)

    def _run(self) -> None:
        while not self.over.wait(self.seconds):
            self.call()


class Clock:
    """The present phase of this process, its start, and the time in each phase.

    Attributes, which other threads may read:
      phase, step: the present phase and step.
      since: time.monotonic() at the start of the phase.
      doing: description of slow work that makes progress in this phase; "": none is known.
      last_progress: time.monotonic() at the start of the phase or at the last progress.
      number: number of phases so far. All processes of a run have the same sequence of phases, so the process with the
        smallest number is behind.
      seconds: {phase: seconds}, without the present phase.
      on_enter: called with (phase, step) at the start of each phase.
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
        """Record progress of slow work in this phase; from any thread."""
        with self.lock:
            self.doing, self.last_progress = doing, time.monotonic()

    @contextlib.contextmanager
    def within(self, phase: str):
        """Enter a phase for the block, then return to the previous phase."""
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
