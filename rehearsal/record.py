# SPDX-License-Identifier: Apache-2.0
"""What a step was found to cost, kept beside the code, so that a change of it is seen and given a reason."""

import json
import pathlib
import re

from configs import topologies
from rehearsal.compiler import LIBRARIES

FOLDER = pathlib.Path(__file__).with_name("recorded")
TOLERANCE = 0.02  # part of a figure that may change unsaid
SLICE = re.compile(r"\bv\d\w*-\d+\b")


def named(recipe: pathlib.Path) -> list[str]:
    """Return the topologies that the docstring of a recipe names."""
    docstring = recipe.read_text().partition('"""')[2].partition('"""')[0]
    return [name for name in dict.fromkeys(SLICE.findall(docstring)) if name in topologies.SLICES]


def path_of(recipe: str, topology: str) -> pathlib.Path:
    """Return where the record of a recipe on a topology is kept."""
    return FOLDER / f"{recipe}_{topology}.json"


def figures(found: dict) -> dict[str, float]:
    """Return of an estimate what is recorded, of one chip and one step."""
    kept = {
        "step_seconds": found["step_seconds"],
        "hbm_gib": found["hbm_gib"]["total"],
        "flops_model": found["flops_model"],
        "flops_hardware": found["flops_hardware"],
    }
    for row in found["collectives"]:
        name = f"{row['kind']} over {row['axes']}"
        for what in ("count", "gib"):
            kept[f"{name}: {what}"] = kept.get(f"{name}: {what}", 0) + row[what]
    return {name: value if isinstance(value, int) else float(f"{value:.5g}") for name, value in sorted(kept.items())}


def changes(recorded: dict[str, float], now: dict[str, float]) -> list[str]:
    """Return a line for each figure that is not what was recorded, 2 % aside."""
    lines = []
    for name in sorted(recorded.keys() | now.keys()):
        before, after = recorded.get(name, 0), now.get(name, 0)
        if abs(after - before) > TOLERANCE * abs(before):
            by = f" ({after / before - 1:+.1%})" if before else ""
            lines.append(f"{name}: {before:g} -> {after:g}{by}")
    return lines


def other_versions(recorded: dict, now: dict[str, str]) -> list[str]:
    """Return a line for each library that was another one when it was recorded."""
    return [
        f"{name} {recorded['versions'].get(name)} -> {now.get(name)}"
        for name in LIBRARIES
        if recorded["versions"].get(name) != now.get(name)
    ]


def write(path: pathlib.Path, reason: str, found: dict[str, float], versions: dict[str, str]) -> None:
    """Record figures, and why they are not what they were."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"reason": reason, "versions": versions, "figures": found}, indent=1) + "\n")
