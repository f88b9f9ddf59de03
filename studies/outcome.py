# SPDX-License-Identifier: Apache-2.0
"""What a trial's folder says of its run: evaluations, time, cost, goodput and checkpoint."""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import TypeVar

from checkpointing import manifest
from checkpointing.bucket import failures_of, path_of
from configs import topologies
from files.json_reader import JsonError, read_json
from reporting.goodput import SignOfLife, newest_parts
from reporting.metrics import WENT_BACK, Line, parse_lines, read_lines, steps_of
from settings import stored_config

HOUR = 3600.0
Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The figures of a run."""

    evaluations: list[dict[str, float | int | None]]  # the figures of each evaluation, in order of steps
    wall_seconds: float  # time that processes of the run took, over all its restarts
    chips: int  # of the topology; 1 without one
    cost: float | None  # in dollars; None if the price of a chip is not known
    goodput: float  # fraction of `wall_seconds` that was spent on training that is not lost
    checkpoint: str  # the newest, as an address; "" if there is none
    checkpoint_bytes: int | None  # of its files; None if it has no manifest
    ran_seconds: float  # time that the worker counted
    breadth: dict[str, float] = dataclasses.field(default_factory=dict)  # accuracy by depth and breadth; {} without

    @property
    def chip_hours(self) -> float:
        """Hours of all chips."""
        return self.wall_seconds * self.chips / HOUR

    def curve(self, metric: str) -> dict[int, float]:
        """Return the metric by step, where it is finite."""
        return curve_of(self.evaluations, metric)


def price_of(topology: str, given: float | None) -> float | None:
    """Return dollars per chip-hour: the given price, which may be 0, else the preset's; None if neither is known."""
    if given is not None or not topology:
        return given
    return topologies.get(topology).price_per_chip_hour


def chips_of(topology: str) -> int:
    """Return the number of chips of a preset; 1 without one."""
    return topologies.get(topology).chips if topology else 1


class GrowingCurve:
    """A metric by step, from the folder of a run that goes on; each look parses only the new lines."""

    def __init__(self, workdir: str, metric: str):
        """Begin before the first line."""
        self._path, self._metric = path_of(workdir) / "metrics.jsonl", metric
        self._failures = (*failures_of(workdir), JsonError)
        self._forget()

    def look(self) -> dict[int, float]:
        """Return the metric by step, where it is finite; {} if the lines cannot be read."""
        try:
            lines = parse_lines(self._new(), str(self._path))
        except self._failures:
            self._forget()
            return {}
        self._lines += [line for line in lines if line["kind"] == "eval" or line.get("event") in WENT_BACK]
        return curve_of(steps_of(self._lines, "eval"), self._metric)

    def _forget(self) -> None:
        self._offset, self._lines = 0, []

    def _new(self) -> bytes:
        """Return the complete lines after those of the last look, or all if the file has become shorter."""
        with self._path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            if file.tell() < self._offset:
                self._forget()
            file.seek(self._offset)
            content = file.read()
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete


def _if_readable(read: Callable[[], Found], otherwise: Found) -> Found:
    """Return the result of `read`, or `otherwise` if a file is missing or damaged."""
    try:
        return read()
    except (ValueError, FileNotFoundError, NotADirectoryError):
        return otherwise


def _figures(lines: list[Line], kind: str) -> list[dict[str, float | int | None]]:
    of_kind = steps_of(lines, kind)
    return [{name: value for name, value in line.items() if name not in ("kind", "time")} for line in of_kind]


def curve_of(evaluations: list[dict[str, float | int | None]], metric: str) -> dict[int, float]:
    """Return the metric by step, where it is finite."""
    values = {line["step"]: line.get(metric) for line in evaluations}
    return {step: value for step, value in values.items() if value is not None and math.isfinite(value)}


def read(
    workdir: str, topology: str, ran_seconds: float = 0.0, price: float | None = None, *, ran_before: float = 0.0
) -> Outcome:  # fmt: skip
    """Return the outcome in a folder; figures that it does not have are 0 or absent.

    Args:
      ran_seconds: time that the worker counted; it is used if the folder has no heartbeats, as in a bucket, and no
        later account of a longer time.
      price: dollars per chip-hour; None: the preset's.
      ran_before: the same time of earlier trials in this folder, see trials.RAN_BEFORE.

    Raises one of `failures_of(workdir)` if the folder does not answer or is refused.
    """
    folder = path_of(workdir)
    lines = _if_readable(lambda: read_lines(folder / "metrics.jsonl"), [])
    heartbeat = _if_readable(lambda: read_json(folder / "workers" / "0.json", SignOfLife), None)
    parts = newest_parts(heartbeat and heartbeat["seconds"], lines)
    wall = sum(seconds for name, seconds in parts.items() if name != "idle")
    if not (heartbeat and wall):  # a process that was killed wrote no event of its end
        wall = max(wall, ran_before + ran_seconds)
    chips, price = chips_of(topology), price_of(topology, price)
    step = stored_config.trained_to(folder)
    breadths = _figures(lines, "breadth")
    size = None if step is None else _if_readable(lambda: _bytes_of(folder / "checkpoints" / str(step)), None)
    return Outcome(
        evaluations=_figures(lines, "eval"),
        breadth={name: value for name, value in breadths[-1].items() if "/" in name} if breadths else {},
        wall_seconds=wall,
        ran_seconds=ran_seconds,
        chips=chips,
        cost=None if price is None else wall * chips / HOUR * price,
        goodput=parts.get("training", 0.0) / wall if wall else 0.0,
        checkpoint="" if step is None else f"{workdir}/checkpoints/{step}",
        checkpoint_bytes=size,
    )


def _bytes_of(checkpoint) -> int:
    return sum(size for size, _ in manifest.read(checkpoint)["files"].values())
