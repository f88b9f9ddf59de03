# SPDX-License-Identifier: Apache-2.0
"""Turns SIGINT and SIGTERM into a request that the loop answers between two steps."""

import contextlib
import signal
import sys


class Interrupted(Exception):
    """The run was asked to stop and its state is saved; the message is the last line that the user reads."""

    exit_status = 75

    def __init__(self, step: int):
        super().__init__(f"saved at step {step}; run the same command to go on")


class Interruption:
    """`requested` is true from the first signal on; a second SIGINT ends the process without saving.

    With `at_once` set, which is when nothing is left to save, the first signal ends it.
    """

    def __init__(self):
        self.requested = self.at_once = False

    def request(self, number: int, frame) -> None:
        """Handle a signal."""
        if self.at_once or (self.requested and number == signal.SIGINT):
            raise KeyboardInterrupt
        self.requested = True
        print("\nstopping after this step; Ctrl-C again stops at once, without saving", file=sys.stderr, flush=True)


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
