# SPDX-License-Identifier: Apache-2.0
"""How far a long preparation is: a bar on a terminal, a plain line now and then elsewhere."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

EVERY_SECONDS = 5.0  # between plain lines


@contextmanager
def progress(title: str, total_bytes: int | None, announce: Callable[[str], object]) -> Iterator[Callable[[int], None]]:
    """Yield advance(num_bytes), which shows the part done and the time left, or what is done of an unknown total."""
    if not sys.stderr.isatty():
        yield _plain(title, total_bytes, announce)
        return
    speed = TransferSpeedColumn()
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), speed, TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def _plain(title: str, total_bytes: int | None, announce: Callable[[str], object]) -> Callable[[int], None]:
    done, started = 0, time.monotonic()
    last = started

    def advance(num_bytes: int) -> None:
        nonlocal done, last
        done, now = done + num_bytes, time.monotonic()
        if now - last < EVERY_SECONDS or done >= (total_bytes or math.inf):
            return
        last, speed = now, done / (now - started)
        part, left = f"{done / 1e6:,.1f} MB", ""
        if total_bytes:
            part = f"{done / total_bytes:.0%} of {total_bytes / 1e6:,.1f} MB"
            left = f", {(total_bytes - done) / speed:,.0f} s left"
        announce(f"{title}: {part}, {speed / 1e6:.1f} MB/s{left}")

    return advance
