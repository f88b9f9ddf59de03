# SPDX-License-Identifier: Apache-2.0
"""Turns SIGINT and SIGTERM into a stop request; all processes then stop after the same step."""

import concurrent.futures
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

import jax

from cluster import processes
from configs.errors import OfAllProcesses

POLL_SECONDS = 0.05
ECHO_SECONDS = 0.5  # make forwards a SIGTERM that was sent to the whole process group, so that it arrives twice


class Interrupted(OfAllProcesses):
    """The run was asked to stop and its state is saved; the message is the last line that the user reads."""

    exit_status = 75

    def __init__(self, step: int):
        where = f"saved at step {step}" if step else "stopped before the end of step 1, with nothing to save"
        super().__init__(f"{where}; run the same command to continue")


class InterruptedHere(Exception):
    """A signal ended this process at once, and so ends the others; the state is saved."""

    exit_status = 75


class Interruption:
    """The stop request: `requested` is true after the first signal or `ask`. A second signal ends without saving.

    If `at_once` is set, because nothing is left to save, the first signal ends the run.
    """

    def __init__(self):
        self.requested = self.at_once = self.signalled = False
        self.echo_until = 0.0  # time.monotonic()

    def request(self, number: int, frame) -> None:
        """Handle a signal."""
        if number == signal.SIGTERM and time.monotonic() < self.echo_until:
            return
        if self.at_once or self.signalled:
            raise KeyboardInterrupt
        self.signalled = True
        self.echo_until = time.monotonic() + ECHO_SECONDS if number == signal.SIGTERM else 0.0
        self._stop("stopping; a second signal (Ctrl-C) stops at once, without saving")

    @contextlib.contextmanager
    def saved_at(self, step: int):
        """Within the block the last state is saved, so the first signal ends the run."""
        self.at_once = True
        try:
            yield
        except KeyboardInterrupt:
            raise InterruptedHere(str(Interrupted(step))) from None

    def ask(self, why: str) -> None:
        """Request a stop as the first signal does, from any thread; the next signal still counts as the first.

        A machine that announces its preemption also sends a SIGTERM at the end, which must not interrupt the save.
        """
        self._stop(f"stopping: {why}")

    def _stop(self, line: str) -> None:
        self.requested = True
        processes.ask_to_stop()
        with contextlib.suppress(OSError):  # a full disk, or a pipe whose reader the same Ctrl-C ended
            os.write(2, f"\n{line}\n".encode())  # a signal may interrupt print, which is not reentrant

    def agreed(self) -> bool:
        """Pass a boundary, after a step or before an evaluated batch; return whether all processes stop here."""
        return processes.boundary() if processes.count() > 1 else self.requested


def in_thread(
    executor: concurrent.futures.Executor, train_step: Callable, interruption: Interruption,
    stop_error: Callable[[], Exception],
) -> Callable:  # fmt: skip
    """Return a train_step that runs in the thread of `executor`, so that the main thread can handle signals meanwhile.

    It is for steps that take minutes. If a stop is requested, it raises `stop_error()`, and does not wait for the
    current step.
    """

    def run(state, batch):
        future = executor.submit(lambda: jax.block_until_ready(train_step(state, batch)))
        while not future.done():
            if interruption.requested:
                raise stop_error()
            time.sleep(POLL_SECONDS)
        return future.result()

    return run


def check_main_thread() -> None:
    """Raise RuntimeError in another thread, where no signal can be handled."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("call train() in the main thread: only that one can handle signals")


@contextlib.contextmanager
def interruption():
    """Handle SIGINT and SIGTERM with an Interruption during the block."""
    state = Interruption()
    before = {number: signal.signal(number, state.request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield state
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
