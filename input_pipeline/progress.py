# SPDX-License-Identifier: Apache-2.0
"""How far a long preparation is: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

EVERY_SECONDS = 5.0  # between plain lines


@contextmanager
def progress(title: str, total_bytes: int, announce: Callable[[str], object]) -> Iterator[Callable[[int], None]]:
    """Yield advance(num_bytes), which shows the part done and the time left."""
    if not sys.stderr.isatty():
        yield _plain(title, total_bytes, announce)
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def _plain(title: str, total_bytes: int, announce: Callable[[str], object]) -> Callable[[int], None]:
    done, started = 0, time.monotonic()
    last = started

    def advance(num_bytes: int) -> None:
        nonlocal done, last
        done, now = done + num_bytes, time.monotonic()
        if now - last < EVERY_SECONDS or done >= total_bytes:
            return
        last, left = now, (now - started) * (total_bytes - done) / done
        announce(f"{title}: {done / total_bytes:.0%} of {total_bytes / 1e6:,.1f} MB, {left:,.0f} s left")

    return advance
