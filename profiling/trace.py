# SPDX-License-Identifier: Apache-2.0
"""Reads a trace of jax.profiler: which instructions of a program each device executed, and when.

A TPU has a plane with a line of instructions, which follow each other, and a line of programs. A GPU has a plane with a
line for each stream. A CPU has one plane for the host, with a line for each thread, on which instructions of several
devices may run. All times are in seconds.
"""

import pathlib
import re
from collections import defaultdict
from typing import NamedTuple

from jax.profiler import ProfileData

ACCELERATOR = re.compile(r"/device:(TPU|GPU):(\d+)")
INSTRUCTIONS, PROGRAMS = "XLA Ops", "XLA Modules"  # lines of a TPU
NANOSECOND = 1e-9


class Op(NamedTuple):
    """One execution of an instruction of the program. Another one may begin within it, as in the body of a loop."""

    name: str
    start: float
    end: float
    own_seconds: float  # without the instructions within it


class Device(NamedTuple):
    """What a device executed of the program.

    Attributes:
      name: such as "TPU 0".
      ops: in the order of their starts.
      runs: start and end of each execution of the whole program; empty if the trace does not have them.
    """

    name: str
    ops: list[Op]
    runs: list[tuple[float, float]]


def read(path: pathlib.Path, program: str) -> list[Device]:
    """Return the devices of a file *.xplane.pb that executed `program`, the name of an HLO module."""
    devices = []
    for plane in ProfileData.from_file(str(path)).planes:
        if found := ACCELERATOR.fullmatch(plane.name):
            devices.append(_accelerator(f"{found[1]} {found[2]}", list(plane.lines), program))
        elif plane.name == "/host:CPU":
            devices += _of_cpu(list(plane.lines), program)
    return [device for device in devices if device.ops]


def _accelerator(name: str, lines: list, program: str) -> Device:
    runs = sorted(
        _times(event) for line in lines if line.name == PROGRAMS for event in line.events
        if event.name.partition("(")[0] == program
    )  # fmt: skip
    named = [line for line in lines if line.name == INSTRUCTIONS] or [line for line in lines if line.name != PROGRAMS]
    ops = []
    for line in named:
        found = [(_instruction(event.name, stats), *_times(event)) for event, stats in _of_program(line, program, runs)]
        ops += _with_own_seconds(found)
    return Device(name, sorted(ops, key=lambda op: op.start), runs)


def _of_program(line, program: str, runs: list[tuple[float, float]]):
    """Yield (event, its statistics) of the instructions of a program, by their module or by its runs."""
    for event in line.events:
        stats = dict(event.stats)
        if "hlo_module" in stats:
            if stats["hlo_module"] == program:
                yield event, stats
        elif any(start <= event.start_ns * NANOSECOND < end for start, end in runs):
            yield event, stats


def _of_cpu(lines: list, program: str) -> list[Device]:
    """Return the simulated devices of a host, one for each ordinal."""
    ops, runs = defaultdict(list), defaultdict(list)
    for line in lines:
        by_device = defaultdict(list)
        for event in line.events:
            stats = dict(event.stats)
            if stats.get("hlo_module") == program:
                times = _times(event)
                by_device[stats["device_ordinal"]].append((stats["hlo_op"], *times))
                runs[stats["device_ordinal"], stats["run_id"]].append(times)
        for ordinal, found in by_device.items():
            ops[ordinal] += _with_own_seconds(found)
    return [
        Device(
            f"CPU {ordinal}", sorted(found, key=lambda op: op.start),
            sorted((min(times)[0], max(end for _, end in times)) for (of, _), times in runs.items() if of == ordinal),
        )
        for ordinal, found in sorted(ops.items())
    ]  # fmt: skip


def _instruction(name: str, stats: dict) -> str:
    """Return the name of an instruction; the TPU's events have its whole text, as in `%fusion.3 = ...`."""
    return stats.get("hlo_op") or name.removeprefix("%").partition(" ")[0]


def _times(event) -> tuple[float, float]:
    return event.start_ns * NANOSECOND, (event.start_ns + event.duration_ns) * NANOSECOND


def _with_own_seconds(found: list[tuple[str, float, float]]) -> list[Op]:
    """Return the instructions of a line (name, start, end), where one that begins within another is a part of it."""
    found = sorted(found, key=lambda op: (op[1], -op[2]))
    own, open_ = [end - start for _, start, end in found], []
    for number, (_, start, end) in enumerate(found):
        while open_ and found[open_[-1]][2] <= start:
            open_.pop()
        if open_:
            own[open_[-1]] -= end - start
        open_.append(number)
    return [Op(*op, max(0.0, seconds)) for op, seconds in zip(found, own, strict=True)]
