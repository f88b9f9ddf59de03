# SPDX-License-Identifier: Apache-2.0
"""What each configuration of a group costs and reaches, and which ones no other beats in both."""

import dataclasses
import statistics

from studies.report import pareto, sizes
from studies.report.answers import Row

CHIP_HOURS, FLOPS = "chip-hours of a run", "floating-point operations of a run"


@dataclasses.dataclass(frozen=True)
class Costs:
    """The configurations of a group that are done, by cost."""

    unit: str  # CHIP_HOURS, or FLOPS of the training if no chip-hours are recorded
    rows: list[Row]  # in order of the table
    costs: list[float]  # of a run of each row
    front: list[int]  # indices of the rows on the Pareto front, by rising cost


def of_rows(rows: list[Row], direction: str) -> Costs | None:
    """Return the costs; None if they do not differ, or if neither hours nor operations are known.

    `direction` says whether a larger metric is better: maximize, or minimize.
    """
    done = [row for row in rows if row.values]
    unit, costs = CHIP_HOURS, [statistics.fmean(row.hours) for row in done]
    if not all(costs):
        unit, costs = FLOPS, [sizes.training_flops(row.config) for row in done]
    if len(set(costs)) < 2 or None in costs:
        return None
    sign = -1 if direction == "maximize" else 1
    return Costs(
        unit, done, costs, pareto.front([(cost, sign * row.mean) for cost, row in zip(costs, done, strict=True)])
    )


def sentence(found: Costs) -> str:
    """Return what the plot of the costs shows, in words."""
    named = ", ".join(found.rows[index].name for index in found.front)
    return f"Filled points are the Pareto front of the means, which nothing beats in both: {named}."
