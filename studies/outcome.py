# SPDX-License-Identifier: Apache-2.0
"""What a trial's folder says of its run: evaluations, time, cost, goodput and checkpoint."""

import dataclasses
import math

from checkpointing.bucket import path_of
from configs import topologies
from files.json_reader import JsonError, read_json
from reporting.goodput import SignOfLife
from reporting.metrics import read_steps
from settings import stored_config

HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The figures of a run.

    Attributes:
      evaluations: the figures of each evaluation, in order of steps.
      wall_seconds: in which processes of the run lived, over all its restarts.
      chips: of the topology; 1 without one.
      cost: in dollars; None if the price of a chip is not known.
      goodput: fraction of `wall_seconds` in which steps trained that count.
      checkpoint: the newest, as an address; "" if there is none.
    """

    evaluations: list[dict[str, float | int | None]]
    wall_seconds: float
    chips: int
    cost: float | None
    goodput: float
    checkpoint: str

    @property
    def chip_hours(self) -> float:
        """Hours of all chips."""
        return self.wall_seconds * self.chips / HOUR

    def curve(self, metric: str) -> dict[int, float]:
        """Return the metric by step, where it is finite."""
        return curve_of(self.evaluations, metric)

    def attributes(self) -> dict[str, object]:
        """Return the user attributes of an ended trial."""
        return dataclasses.asdict(self) | {"chip_hours": self.chip_hours}


def evaluations_of(workdir: str) -> list[dict[str, float | int | None]]:
    """Return the figures of each evaluation in a folder, in order of steps; none if they cannot be read."""
    try:
        lines = read_steps(path_of(workdir) / "metrics.jsonl", "eval")
    except (OSError, JsonError):
        lines = []
    return [{name: value for name, value in line.items() if name not in ("kind", "time")} for line in lines]


def curve_of(evaluations: list[dict[str, float | int | None]], metric: str) -> dict[int, float]:
    """Return the metric by step, where it is finite."""
    values = {line["step"]: line.get(metric) for line in evaluations}
    return {step: value for step, value in values.items() if value is not None and math.isfinite(value)}


def read(workdir: str, topology: str) -> Outcome:
    """Return the outcome in a folder; figures that it does not have are 0 or absent."""
    folder = path_of(workdir)
    try:
        parts = read_json(folder / "workers" / "0.json", SignOfLife)["seconds"]["parts"]
    except (OSError, JsonError):
        parts = {}
    wall = sum(seconds for name, seconds in parts.items() if name != "idle")
    preset = topologies.get(topology) if topology else None
    chips = preset.chips if preset else 1
    price = preset.price_per_chip_hour if preset else None
    step = stored_config.trained_to(folder)
    return Outcome(
        evaluations=evaluations_of(workdir),
        wall_seconds=wall,
        chips=chips,
        cost=None if price is None else wall * chips / HOUR * price,
        goodput=parts.get("training", 0.0) / wall if wall else 0.0,
        checkpoint="" if step is None else f"{workdir}/checkpoints/{step}",
    )
