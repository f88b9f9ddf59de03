# SPDX-License-Identifier: Apache-2.0
"""Figures of a trace: seconds of a step by class and by line of code, idle time, exposed collectives, rates.

All seconds are those of one device in one step: sums over the trace, divided by devices and steps.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from profiling.program import Program
from profiling.trace import Device
from rehearsal.assumptions import Assumptions
from rehearsal.estimate import summed

LONGEST = 20  # operations that are listed


def summarise(devices: Sequence[Device], program: Program, num_steps: int, given: Assumptions) -> dict:
    """Return the figures of the devices of this process.

    Args:
      devices: with at least one instruction each.
      num_steps: that were traced.
      given: rates of one device; infinite where they are unknown.
    """
    rows = [_row(op, program) for device in devices for op in device.ops]
    per = 1 / (num_steps * len(devices))
    by_class = defaultdict(float)
    for row in rows:
        by_class[row["class"]] += row["seconds"] * per
    by_class.pop("", None)
    rows = [row for row in rows if row["class"]]
    windows = [max(op.end for op in device.ops) - device.ops[0].start for device in devices]
    busy = [_busy(device, program) for device in devices]
    return {
        "step_seconds": _percentiles([seconds for device in devices for seconds in _step_seconds(device)]),
        "seconds_by_class": dict(sorted(by_class.items(), key=lambda item: -item[1])),
        "by_file": _by_file(rows, per),
        "operations": _operations(rows, per, given),
        "idle_share": 1 - sum(busy) / sum(windows),
        "exposed_collective_seconds": sum(_exposed(device, program) for device in devices) * per,
        "flops": sum(row["flops"] for row in rows) * per,
        "bytes": sum(row["bytes"] for row in rows) * per,
        "busy_seconds": {device.name: seconds / num_steps for device, seconds in zip(devices, busy, strict=True)},
    }


def _row(op, program: Program) -> dict:
    found = program.kind(op.name)._asdict()
    return {"class": found.pop("category"), "seconds": op.own_seconds, "count": 1} | found


def _by_file(rows: list[dict], per: float) -> list[dict]:
    """Return the seconds of each file of this workspace and part of the step, the longest first."""
    found = summed(
        ({"file": row["source"].partition(":")[0] or "-", "part": row["part"]}, {"seconds": row["seconds"] * per})
        for row in rows
    )
    whole = sum(row["seconds"] for row in found)
    return [row | {"share": row["seconds"] / whole} for row in found]


def _operations(rows: list[dict], per: float, given: Assumptions) -> list[dict]:
    """Return the longest operations, those of one line and name together, with their rates against the peaks."""
    names, sums = ("class", "name", "source", "part"), ("seconds", "count", "flops", "bytes")
    found = summed(({k: row[k] for k in names}, {k: row[k] * per for k in sums}) for row in rows)
    whole = sum(row["seconds"] for row in found)
    for row in found[:LONGEST]:
        seconds = row["seconds"] or float("inf")
        rates = {"flops_per_second": row["flops"] / seconds, "bytes_per_second": row["bytes"] / seconds}
        row |= rates | {"share": row["seconds"] / whole, "bound": _bound(rates, given)}
    return found[:LONGEST]


def _bound(rates: dict[str, float], given: Assumptions) -> str | None:
    """Return which rate is nearer to its peak, compute or memory (Williams et al. 2009); None if a peak is unknown."""
    if math.inf in (given.peak_flops, given.memory_bandwidth):
        return None
    of_memory = rates["bytes_per_second"] / given.memory_bandwidth
    return "compute" if rates["flops_per_second"] / given.peak_flops >= of_memory else "memory"


def _step_seconds(device: Device) -> list[float]:
    """Return the time from the end of each run of the program to the end of the next; of a single run its length."""
    ends = [end for _, end in device.runs]
    if len(ends) == 1:
        return [device.runs[0][1] - device.runs[0][0]]
    return [later - end for end, later in itertools.pairwise(ends)]


def _percentiles(seconds: list[float]) -> dict[str, float] | None:
    """Return mean, median, what 90 % of the steps do not exceed, and maximum; None if there are no steps."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    rank = -(-9 * len(ordered) // 10)  # an integer, so that no rounding moves it
    return {
        "mean": statistics.fmean(ordered), "p50": statistics.median(ordered), "p90": ordered[rank - 1],
        "max": ordered[-1],
    }  # fmt: skip


def _busy(device: Device, program: Program) -> float:
    """Return the seconds in which a device executed something."""
    return _covered((op.start, op.end) for op in device.ops if program.kind(op.name).category)


def _exposed(device: Device, program: Program) -> float:
    """Return the seconds of collectives in which nothing else ran."""
    of_core = [op for op in device.ops if program.kind(op.name).category not in ("", "collective")]
    return _busy(device, program) - _covered((op.start, op.end) for op in of_core)


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
