# SPDX-License-Identifier: Apache-2.0
"""Watches for Google Compute Engine's notice that this machine is about to be preempted or terminated."""

import contextlib
import threading
from collections.abc import Callable

from cluster import metadata

ENDS = {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE", "preempted": "TRUE"}  # key of the metadata, value
# A request blocks for this many seconds unless the value changes. A machine whose last request is more than an hour old
# gets no notice of maintenance.
HANG_SECONDS = 60
ANSWER_SECONDS = 10.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0  # between requests; doubled while they fail


@contextlib.contextmanager
def maintenance_notices(on_notice: Callable[[str], None]):
    """Watch the metadata of a Compute Engine machine for its end, during the block.

    A machine ends by preemption, or by maintenance that terminates it, as for machines with TPUs or GPUs. Live
    migration is ignored. If the metadata server fails, it is silently asked again later. `on_notice` is called once, in
    a thread, at the first notice, with a line that describes it.
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
        with telling:  # so that no notice is given after the block
            over.set()


def _watch(host: str, key: str, tell: Callable[[str], None], over: threading.Event) -> None:
    """Call `tell` when the key has the value that ends the machine."""
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
        over.wait(pause)  # also after an answer: not every metadata server blocks a request
