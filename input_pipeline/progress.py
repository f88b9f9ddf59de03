# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of a long preparation: a bar on a terminal, plain lines at intervals elsewhere."""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from files.terminal import is_live

EVERY_SECONDS = 5.0  # between plain lines


@contextmanager
def progress(
    title: str, total: int | None, announce: Callable[[str], object], unit: str = ""
) -> Iterator[Callable[[int], None]]:
    """Yield advance(number), which shows the fraction done and the time left, or the count of an unknown total.

    Only the main thread has a bar; other threads, which run while a run shows its own display, print lines. `unit` is
    what is counted, a plural; '' stands for bytes.
    """
    if not is_live(sys.stderr) or threading.current_thread() is not threading.main_thread():
        yield _plain(title, total, announce, unit)
        return
    done = (MofNCompleteColumn(), TextColumn(unit)) if unit else (DownloadColumn(), TransferSpeedColumn())
    columns = TextColumn("{task.description}"), BarColumn(), *done, TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda number: bar.advance(task, number)


def _plain(title: str, total: int | None, announce: Callable[[str], object], unit: str) -> Callable[[int], None]:
    done, started = 0, time.monotonic()
    last = started

    def amount(number: float) -> str:
        return f"{number:,.0f} {unit}" if unit else f"{number / 1e6:,.1f} MB"

    def advance(number: int) -> None:
        nonlocal done, last
        done, now = done + number, time.monotonic()
        if not done or now - last < EVERY_SECONDS or done >= (total or math.inf):
            return
        last, speed = now, done / (now - started)
        part, left = amount(done), ""
        if total:
            part = f"{done / total:.0%} of {amount(total)}"
            left = f", {(total - done) / speed:,.0f} s left"
        announce(f"{title}: {part}, {amount(speed)}/s{left}")

    return advance
