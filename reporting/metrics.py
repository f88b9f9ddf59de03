# SPDX-License-Identifier: Apache-2.0
"""Write and read metrics.jsonl, the reference record of a run; other receivers of its figures are sinks."""

import contextlib
import json
import logging
import math
import os
import pathlib
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Required

import pydantic

from files.atomic import keep_whole_lines
from files.json_reader import JsonError, Object, parse_json
from reporting.clock import steady_time
from reporting.sink import Sink

Figure = Annotated[float, pydantic.Field(allow_inf_nan=False)] | None
LOG = logging.getLogger("torus")


class Line(Object, total=False):
    """The keys that are read from a line of metrics.jsonl, which has others too.

    A figure is null if it was not finite.
    """

    kind: Required[str]
    time: Annotated[float, pydantic.Field(allow_inf_nan=False)]
    event: str
    step: Annotated[int, pydantic.Field(ge=0, lt=2**31)]
    total_tokens: Annotated[int, pydantic.Field(ge=0, lt=2**63)]
    loss: Figure
    eval_loss: Figure
    gradient_norm: Figure
    learning_rate: Figure
    tokens_per_second: Figure
    step_seconds: Figure
    mfu: Figure
    goodput: Figure


OF_A_LINE = ("kind", "step", "time")  # keys of every line
RESERVED = (*OF_A_LINE, "event", "total_tokens")  # keys of lines that no evaluator and no objective may use
OF_A_STEP = ("train", "eval")  # kinds of lines with a step
WENT_BACK = ("start", "roll_back")  # events whose step is the one that the run goes on from


def read_lines(path: pathlib.Path) -> list[Line]:
    """Return the lines of metrics.jsonl, except incomplete ones that a killed process left.

    Raises:
      JsonError: a line has invalid values; the message names it.
      OSError: the file cannot be read.
    """
    return parse_lines(path.read_bytes(), str(path))


def parse_lines(content: bytes, source: str) -> list[Line]:
    """Return the lines of the content of metrics.jsonl; see `read_lines`. Messages call the content `source`."""
    lines = []
    for number, text in enumerate(content.split(b"\n")[:-1], 1):  # without what follows the last line break
        if text.startswith(b"{") and text.rstrip().endswith(b"}"):
            lines.append(line := parse_json(text, Line, f"{source}, line {number}"))
            if line["kind"] in OF_A_STEP and "step" not in line:
                raise JsonError(f"{source}, line {number}: step is missing")
    return lines


def read_steps(path: pathlib.Path, kind: str) -> list[Line]:
    """Return the last line of each step in metrics.jsonl of a kind (train, eval, event), in order of the steps.

    Lines without a step are left out, and so are figures of steps that were undone and not repeated.

    Raises:
      JsonError: as `read_lines`.
      OSError: the file cannot be read.
    """
    return steps_of(read_lines(path), kind)


def steps_of(lines: Sequence[Line], kind: str) -> list[Line]:
    """Return the last of these lines of each step and of a kind; see `read_steps`."""
    of_step = {line["step"]: line for line in without_abandoned(lines) if line["kind"] == kind and "step" in line}
    return [of_step[step] for step in sorted(of_step)]


def without_abandoned(lines: Sequence[Mapping]) -> list[Mapping]:
    """Return the lines, as they were written, without the figures of steps that a later start or roll back undid.

    All events stay.
    """
    kept, last = [], math.inf
    for line in reversed(lines):
        if line.get("event") in WENT_BACK:
            last = min(last, line.get("step", math.inf))
        if line.get("kind") == "event" or line.get("step", 0) <= last:
            kept.append(line)
    return kept[::-1]


class MetricsWriter:
    """Appends one JSON object per line, each with its `kind`, from any thread.

    On start, it removes an incomplete last line that a killed process left. Lines that cannot be written, because the
    disk is full or the folder was deleted, are kept in memory and written later.
    """

    def __init__(
        self, workdir: pathlib.Path, name: str = "metrics.jsonl", *, sinks: Sequence[Sink] = (), first: bool = True
    ):  # fmt: skip
        """Open the file in `workdir` if this is the `first` process; the other processes write only to `sinks`."""
        self.path = workdir / name if first else pathlib.Path(os.devnull)
        if first and self.path.exists():
            with self.path.open("r+b") as file:
                keep_whole_lines(file)
        self.lock, self.pending, self.sinks = threading.Lock(), [], sinks

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        with self.lock:
            self._append()
            sinks, self.sinks = self.sinks, ()  # a save that ends later writes to the file alone
        if self.pending:
            LOG.error(f"{self.path}: {len(self.pending)} lines could not be written: {''.join(self.pending)}")
            with contextlib.suppress(OSError):  # stderr may be on the same disk; do not hide the run's error
                print(f"{self.path}: {len(self.pending)} lines could not be written", file=sys.stderr, flush=True)
        with contextlib.ExitStack() as all_close:  # even if one fails, or Ctrl-C comes while one waits
            for sink in reversed(sinks):
                all_close.callback(sink.close, error)

    def write(self, kind: str, **figures) -> None:
        """Write one line; non-finite numbers become null."""
        not_finite = {
            name: None for name, value in figures.items() if isinstance(value, float) and not math.isfinite(value)
        }
        line = {"kind": kind} | figures | not_finite | {"time": steady_time()}
        with self.lock:
            self.pending.append(json.dumps(line) + "\n")
            self._append()
            rest = {name: value for name, value in line.items() if name not in OF_A_LINE}
            for sink in self.sinks:
                sink.write(kind, rest, line["step"])

    def _append(self) -> None:
        """Write all pending lines or none."""
        with contextlib.suppress(OSError), self.path.open("ab", buffering=0) as file:
            size, content = file.tell(), "".join(self.pending).encode()
            try:
                written = file.write(content)
            except OSError:
                written = 0
            if written == len(content):
                self.pending.clear()
            else:
                file.truncate(size)
