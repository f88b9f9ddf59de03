# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of a run: a live line with the time left on a terminal, plain lines elsewhere."""

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from files.terminal import is_live
from reporting.sink import LAST_WORDS

LOG = logging.getLogger("torus")
DURATIONS = (  # (the seconds below which a unit is used, its seconds, its digits after the point, its name)
    (90, 1, 0, "s"), (5400, 60, 0, "min"), (172_800, 3600, 1, "h"), (859_680, 86_400, 1, "days"),
)  # fmt: skip
LEAVE_SECONDS = 1.0  # that a terminal has to take the end of the bar
EVALUATED_SECONDS = 5.0, 60.0  # the least and the most between lines about an evaluation


def duration(seconds: float) -> str:
    """Return a readable time: 350 ms, 45 s, 12 min, 3.5 h, 12 days."""
    if seconds < 0.9995:  # which would be 1000 ms
        return f"{1000 * seconds:.0f} ms"
    for limit, size, digits, unit in DURATIONS:
        if seconds < limit:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds / 86_400:,.0f} days"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines of text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def listed(items: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return the first items as a text, and how many there are more."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + more


class Display:
    """The progress of a run, as a context manager; everything that it shows is also logged."""

    def __init__(self, num_steps: int, *, quiet: bool = False):
        """Create the display; with `quiet` it only writes to the log, as in all processes but the first."""
        self.num_steps, self.quiet, self.live = num_steps, quiet, is_live(sys.stdout) and not quiet
        self.after(0)
        self.first_batch_ended = self.evaluation_shown = self.microbatch_ended
        text = TextColumn("{task.description}", table_column=Column())  # wraps, where rich's own would cut it off
        columns = (BarColumn(bar_width=24), text)
        self.progress = Progress(*columns, console=Console(highlight=False), transient=True, disable=not self.live)

    def __enter__(self):
        self.progress.start()
        LAST_WORDS.append(self._leave_terminal)
        self.task = self.progress.add_task("compiling the step", total=self.num_steps)
        return self

    def __exit__(self, *unused):
        LAST_WORDS.remove(self._leave_terminal)
        with contextlib.suppress(OSError):  # the terminal is gone
            self.progress.stop()

    def _leave_terminal(self, line: str, status: int) -> None:
        """Remove the bar, and show the cursor again, in a thread: a terminal may be paused."""
        thread = threading.Thread(target=self.progress.stop, daemon=True)
        thread.start()
        thread.join(LEAVE_SECONDS)

    def line(self, text: str) -> None:
        """Print a line that stays."""
        LOG.info(text)
        with contextlib.suppress(OSError):  # for example a full disk behind stdout; the run continues
            if self.live:
                self.progress.console.print(text, markup=False, soft_wrap=True)
            elif not self.quiet:
                print(f"{text}\n", end="", flush=True)  # in one piece, since several threads print

    def lines(self, texts: list[str]) -> None:
        """Print lines that stay."""
        for text in texts:
            self.line(text)

    def phase(self, text: str) -> None:
        """Show on a terminal what the run does between steps."""
        if self.live:
            self.progress.update(self.task, description=text)

    def after(self, step: int) -> None:
        """Record that step `step` has ended; the next progress belongs to the following step."""
        self.step, self.microbatch_ended = step, time.perf_counter()

    def train(self, step: int, figures: dict, names: Sequence[str] = (), *, grows: bool = False) -> None:
        """Show a logged step, with the figures of these names; if the run `grows`, later steps take longer."""
        others = "".join(f"{name} {figures[name]:.3f}  " for name in names if name in figures)
        rest = f"{'at least ' if grows else ''}{duration((self.num_steps - step) * figures['step_seconds'])} left"
        left = rest if step < self.num_steps else ""
        mfu = f"  mfu {figures['mfu']:.0%}" if figures["mfu"] is not None else ""
        text = (
            f"step {step:>{len(str(self.num_steps))}}/{self.num_steps}  loss {figures['loss']:.3f}  "
            f"{others}{figures['tokens_per_second']:,.0f} tokens/s{mfu}  {left}"
        )
        self._show(step, text)

    def microbatch(self, count: int, index, loss) -> None:
        """Show progress within a long step; called at the end of each of its `count` microbatches."""
        seconds, self.microbatch_ended = time.perf_counter() - self.microbatch_ended, time.perf_counter()
        text = (
            f"step {self.step + 1}/{self.num_steps}: microbatch {int(index) + 1}/{count}  loss {float(loss):.3f}  "
            f"{seconds:.1f} s each  step ends in {duration((count - int(index) - 1) * seconds)}"
        )
        self._show(self.step, text)

    def evaluated(self, done: int, total: int) -> None:
        """Show how many batches of an evaluation are done, at growing intervals, but not the first, which compiles."""
        now = time.perf_counter()
        if done <= 1:
            self.first_batch_ended = self.evaluation_shown = now
            return
        if done == total and self.live:
            self.progress.update(self.task, completed=self.step, total=self.num_steps)
            return
        taken = now - self.first_batch_ended
        least, most = EVALUATED_SECONDS
        if now - self.evaluation_shown >= min(max(least, taken / 10), most):
            self.evaluation_shown, remaining = now, (total - done) * taken / (done - 1)
            self._show(done, f"evaluated {done:,} of {total:,} batches  {duration(remaining)} left", total)

    def _show(self, done: int, text: str, total: int = 0) -> None:
        """Show a line, and on a terminal a bar of what is done of `total`, by default of all steps."""
        if self.live:
            LOG.info(text)
            self.progress.update(self.task, completed=done, total=total or self.num_steps, description=text)
        else:
            self.line(text)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 trial" or "2 trials"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def decimals(size: float) -> int:
    """Return how many decimals a figure of a size needs to be read: 8 for 0.00001234, 4 for 2.3456, 0 for 123,456."""
    if 0 < size < 0.001:
        return 3 - math.floor(math.log10(size))
    return 0 if size >= 10_000 else 4


def left(number: int, noun: str) -> str:
    """Return a clause such as "1 trial is left"."""
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'} left"
