# SPDX-License-Identifier: Apache-2.0
"""Turns SIGINT and SIGTERM into a request that the loop, in all processes alike, answers between two steps."""

import concurrent.futures
import contextlib
import signal
import sys
import time
from collections.abc import Callable

import jax

from parallelism import processes

POLL_SECONDS = 0.05


class Interrupted(Exception):
    """The run was asked to stop and its state is saved; the message is the last line that the user reads."""

    exit_status = 75

    def __init__(self, step: int):
        where = f"saved at step {step}" if step else "stopped before the end of step 1, nothing to save"
        super().__init__(f"{where}; run the same command to go on")


class Interruption:
    """`requested` is true from the first signal on; a second SIGINT ends the process without saving.

    With `at_once` set, which is when nothing is left to save, the first signal ends it.
    """

    def __init__(self, alive: Callable[[], None] = lambda: None):
        """`alive` is called at each boundary."""
        self.requested = self.at_once = False
        self.alive = alive

    def request(self, number: int, frame) -> None:
        """Handle a signal."""
        if self.at_once or (self.requested and number == signal.SIGINT):
            raise KeyboardInterrupt
        self.requested = True
        processes.ask_to_stop()
        print("\nstopping; Ctrl-C again stops at once, without saving", file=sys.stderr, flush=True)

    def agreed(self) -> bool:
        """Pass a boundary, after a step or before a batch is evaluated; return whether all processes stop here."""
        self.alive()
        return processes.boundary() if processes.count() > 1 else self.requested

    def pass_on(self) -> bool:
        """Pass a boundary of what is not stopped any more."""
        self.alive()
        return False


def in_thread(train_step: Callable, interruption: Interruption) -> Callable:
    """Return a train_step that runs in a thread of its own, so that this one can answer signals meanwhile.

    For steps of minutes: an interruption does not wait for the step under way, and the one before is saved.

    Raises:
      Interrupted: a stop was asked for.
    """
    executor = concurrent.futures.ThreadPoolExecutor(1)

    def run(state, batch):
        before = int(state.step)
        future = executor.submit(lambda: jax.block_until_ready(train_step(state, batch)))
        while not future.done():
            if interruption.requested:
                raise Interrupted(before)
            time.sleep(POLL_SECONDS)
        return future.result()

    return run


@contextlib.contextmanager
def interruption(alive: Callable[[], None]):
    """Catch SIGINT and SIGTERM for the time of the block; `alive` is called at each boundary."""
    state = Interruption(alive)
    before = {number: signal.signal(number, state.request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield state
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
