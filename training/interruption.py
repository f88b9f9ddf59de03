# SPDX-License-Identifier: Apache-2.0
"""Turns SIGINT and SIGTERM into a request that the loop, in all processes alike, answers between two steps."""

import concurrent.futures
import contextlib
import os
import signal
import time
from collections.abc import Callable

import jax

from parallelism import processes

POLL_SECONDS = 0.05
ECHO_SECONDS = 0.5  # make passes on a SIGTERM that was sent to the whole process group, so that it comes twice


class Interrupted(Exception):
    """The run was asked to stop and its state is saved; the message is the last line that the user reads."""

    exit_status = 75

    def __init__(self, step: int):
        where = f"saved at step {step}" if step else "stopped before the end of step 1, nothing to save"
        super().__init__(f"{where}; run the same command to go on")


class Interruption:
    """`requested` is true from the first signal on, or once `ask` was called; a second signal ends without saving.

    With `at_once` set, which is when nothing is left to save, the first signal ends it.
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

    def ask(self, why: str) -> None:
        """Ask for the stop that a first signal asks for, from any thread; the next signal is still the first.

        The machine that gives notice of its end also sends a SIGTERM at the end, which must not spoil the saving.
        """
        self._stop(f"stopping: {why}")

    def _stop(self, line: str) -> None:
        self.requested = True
        processes.ask_to_stop()
        with contextlib.suppress(OSError):  # no room, or a pipe whose reader the same Ctrl-C has ended
            os.write(2, f"\n{line}\n".encode())  # print may be what a signal interrupts, and cannot be entered twice

    def agreed(self) -> bool:
        """Pass a boundary, after a step or before a batch is evaluated; return whether all processes stop here."""
        return processes.boundary() if processes.count() > 1 else self.requested


def in_thread(train_step: Callable, interruption: Interruption, saved: Callable[[], int]) -> Callable:
    """Return a train_step that runs in a thread of its own, so that this one can answer signals meanwhile.

    For steps of minutes: where a stop is asked for it raises Interrupted, with the step that `saved` says was saved
    last, and does not wait for the one under way.
    """
    executor = concurrent.futures.ThreadPoolExecutor(1)

    def run(state, batch):
        future = executor.submit(lambda: jax.block_until_ready(train_step(state, batch)))
        while not future.done():
            if interruption.requested:
                raise Interrupted(saved())
            time.sleep(POLL_SECONDS)
        return future.result()

    return run


@contextlib.contextmanager
def interruption():
    """Catch SIGINT and SIGTERM for the time of the block."""
    state = Interruption()
    before = {number: signal.signal(number, state.request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield state
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
