# SPDX-License-Identifier: Apache-2.0
"""Figures of a task with their standard errors, their table, and the file of results."""

import math
import sys
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from files.terminal import is_live
from reporting.display import aligned, duration

PROGRESS_SECONDS = 5.0  # between lines of progress where stderr is not a terminal


class Figure(NamedTuple):
    """A metric of a task, its standard error (NaN for a single item), and the number of items."""

    value: float
    error: float
    count: int


def mean(values: Sequence[float]) -> Figure:
    """Return the mean of the items; its error is the sample's standard deviation over sqrt(count)."""
    count, average = len(values), math.fsum(values) / len(values)
    squares = math.fsum((value - average) ** 2 for value in values)
    return Figure(average, math.sqrt(squares / (count - 1) / count) if count > 1 else math.nan, count)


def ratio(totals: Sequence[float], weights: Sequence[float]) -> Figure:
    """Return sum(totals) / sum(weights); its error is that of the linearised ratio (Cochran, Sampling Techniques, 6.9).

    Args:
      weights: of the items; their sum is not 0.
    """
    count, weight = len(totals), math.fsum(weights)
    value = math.fsum(totals) / weight
    squares = math.fsum((total - value * one) ** 2 for total, one in zip(totals, weights, strict=True))
    return Figure(value, math.sqrt(squares * count / (count - 1)) / weight if count > 1 else math.nan, count)


def exponential(figure: Figure) -> Figure:
    """Return exp of a figure, with the error of the linearised function; infinite if it overflows."""
    value = math.exp(figure.value) if figure.value < 700 else math.inf
    return Figure(value, value * figure.error if figure.error else 0.0, figure.count)


def flat(tasks: dict[str, dict[str, Figure]]) -> dict[str, float]:
    """Return {task/metric: value}, and {task/metric_stderr: error} where there is one."""
    found = {}
    for task, metrics in tasks.items():
        for name, figure in metrics.items():
            found[f"{task}/{name}"] = figure.value
            if not math.isnan(figure.error):
                found[f"{task}/{name}_stderr"] = figure.error
    return found


def lines(found: dict[str, float]) -> list[str]:
    """Return a line for each metric in a result of `flat`."""
    errors = {
        name: f" (standard error {_text(found[f'{name}_stderr'])})" for name in found if f"{name}_stderr" in found
    }
    return [f"{name}: {_text(found[name])}{errors.get(name, '')}" for name in found if not name.endswith("_stderr")]


def table(tasks: Iterable[tuple[str, dict[str, Figure]]]) -> list[str]:
    """Return the lines of a table of all tasks; two of them may have one name."""
    rows = [("task", "metric", "value", "standard error", "items")]
    for task, metrics in tasks:
        for name, (value, error, count) in metrics.items():
            rows.append((task, name, _text(value), "-" if math.isnan(error) else _text(error), f"{count:,}"))
    return aligned(rows)


def _text(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


class Progress:
    """Shows on stderr how much of the work is done and how long the rest takes, unless it is `quiet`."""

    def __init__(self, *, quiet: bool = False):
        self.quiet, self.live = quiet, is_live(sys.stderr) and not quiet
        self.what, self.done, self.began, self.shown = "", 0, 0.0, 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` parts are done; a line every few seconds where stderr is not a terminal."""
        now = time.monotonic()
        if what != self.what or done < self.done:  # a second suite may do the same again
            self.what, self.began, self.shown = what, now, now
        self.done = done
        if done and not self.quiet and (self.live or now - self.shown >= PROGRESS_SECONDS):
            self.shown = now
            left = duration((now - self.began) / done * (total - done))
            text = f"{what}: {done:,} of {total:,}, {left} left"
            print(f"\r{text}\x1b[K" if self.live else text, end="" if self.live else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line on a terminal, for what is printed next."""
        if self.live and self.what:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
