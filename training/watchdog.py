# SPDX-License-Identifier: Apache-2.0
"""Ends a run that hangs, and keeps where it hung."""

import contextlib
import faulthandler
import pathlib
import threading
import time

CHECKS = 20  # in the time allowed
START_SECONDS = 900.0  # at least, for restoring and compiling before the first call


class Hang(RuntimeError):
    """Nothing has ended for too long."""

    exit_status = 1


@contextlib.contextmanager
def watchdog(seconds: float, log: pathlib.Path):
    """Within the block, `alive()`, which it gives, must be called every `seconds`; 0: it need not be.

    The first call may take START_SECONDS. Else the stacks of all threads are written to the end of `log`, and Hang is
    raised in a thread of its own, whose excepthook is to end the process.
    """
    deadline, over = [time.monotonic() + max(seconds, START_SECONDS)], threading.Event()

    def alive() -> None:
        deadline[0] = time.monotonic() + seconds

    def watch() -> None:
        while not over.wait(seconds / CHECKS):
            if time.monotonic() > deadline[0]:
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("a") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
                raise Hang(f"no step ended for {seconds:g} s; where every thread was is in {log}")

    if seconds:
        threading.Thread(target=watch, daemon=True, name="watchdog").start()
    try:
        yield alive
    finally:
        over.set()
