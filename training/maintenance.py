# SPDX-License-Identifier: Apache-2.0
"""Heeds the notice of Google Compute Engine that this machine is about to be taken away."""

import contextlib
import threading
from collections.abc import Callable

from parallelism import metadata

ENDS = {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE", "preempted": "TRUE"}  # key of the metadata, value
# A request hangs for as long, unless the value changes. Who has not asked for an hour gets no notice of maintenance.
HANG_SECONDS = 60
ANSWER_SECONDS = 10.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0  # between requests; doubled while they fail


@contextlib.contextmanager
def maintenance_notices(on_notice: Callable[[str], None]):
    """Within the block, on a machine of Compute Engine, watch its metadata for the end of the machine.

    That is preemption, and maintenance that terminates it, as it does a machine with TPUs or GPUs; not maintenance that
    moves it alive. A metadata server that fails is asked again later, and nothing is said of it. `on_notice` is called
    once, in a thread, at the first notice, with a line that says what was announced.
    """
    host, over, telling = metadata.find_host(), threading.Event(), threading.Lock()

    def tell(text: str) -> None:
        with telling:
            if not over.is_set():
                over.set()
                on_notice(text)

    for key in ENDS if host else ():
        threading.Thread(target=_watch, args=[host, key, tell, over], daemon=True, name=f"watch of {key}").start()
    try:
        yield
    finally:
        with telling:  # so that none is given after the block
            over.set()


def _watch(host: str, key: str, tell: Callable[[str], None], over: threading.Event) -> None:
    """Tell when the key has the value that ends the machine."""
    tag, pause = "0", FIRST_PAUSE_SECONDS
    while not over.is_set():
        try:
            value, tag = metadata.ask(
                host, key, HANG_SECONDS + ANSWER_SECONDS,
                wait_for_change="true", timeout_sec=HANG_SECONDS, last_etag=tag,
            )  # fmt: skip
            pause = FIRST_PAUSE_SECONDS
        except metadata.FAILURES:
            value, pause = None, min(2 * pause, LONGEST_PAUSE_SECONDS)
        if value == ENDS[key]:
            tell(f"Compute Engine is about to end this machine: instance/{key} is {value}")
        over.wait(pause)  # after an answer too: not every metadata server lets a request hang
