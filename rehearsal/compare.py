# SPDX-License-Identifier: Apache-2.0
"""One configuration on several slices: which is the cheapest per token, and how well the rate of a chip holds."""

import dataclasses
from collections.abc import Callable

from configs import topologies as presets
from configs import validation
from configs.base import MESH_AXES, ConfigError
from rehearsal import report
from rehearsal.compiler import Compiled, CompileError
from rehearsal.estimate import estimate

STATE = "Parameters, optimizer GiB"
COST = "$ a billion tokens"
DATA, FSDP = (1, 2, 4, 8), (1, 2, 4)


def slices(load: Callable, wanted: list[presets.Topology], display) -> dict:
    """Return a table of topologies, the cheapest per token first; one that the configuration cannot run on says why.

    Args:
      load: name of a topology -> the Loaded configuration for it.
    """
    rows = []
    for topology, (loaded, result) in zip(wanted, _compiled(load, wanted, display), strict=True):
        row = {"topology": topology.name, "Chips": topology.chips}
        if isinstance(result, Exception):
            rows.append(row | {"verdict": str(result)})
            continue
        found = estimate(result)
        cost = report.cost(found, loaded.config.train.steps, topology)
        rows.append(row | {
            "verdict": "fits" if found["fits"] else "does not fit",
            "GiB": found["hbm_gib"]["total"], "A step": found["step_seconds"], "MFU": found["mfu"],
            "Tokens/s": found["tokens_per_second"] and round(found["tokens_per_second"]),
            COST: cost["cost_per_billion_tokens"] if found["fits"] else None,
            "A run": cost["run"]["days"] and 86_400 * cost["run"]["days"], "$ a run": cost["run"]["dollars"],
        })  # fmt: skip
    rows.sort(key=lambda row: row.get(COST) or float("inf"))
    cheapest = rows[0]["topology"] if rows[0].get(COST) else None
    note = f"the cheapest per token: {cheapest}" if cheapest else "none fits at a known price"
    return {
        "title": f"{loaded.recipe} on {len(rows)} slices, the cheapest per token first",
        "columns": ["topology", "Chips", "verdict", "GiB", "A step", "MFU", "Tokens/s", COST, "A run", "$ a run"],
        "rows": rows,
        "best": cheapest,
        "notes": [f"{note}; list prices of {presets.PRICES_AS_OF} unless --price is given; times are estimates"],
    }


def _compiled(load: Callable, wanted: list[presets.Topology], display) -> list[tuple]:
    """Return (Loaded, Compiled or the error) of each topology."""
    results: list = [None] * len(wanted)
    pairs, places = [], []
    for index, topology in enumerate(wanted):
        loaded = load(topology.name)
        try:
            validation.validate(loaded.config, topology.chips)
            pairs.append((loaded.config, topology))
            places.append(index)
            results[index] = loaded, None
        except ConfigError as error:
            results[index] = loaded, error
    with display.working(f"compiling for {', '.join(t.name for _, t in pairs)}") as update:
        for index, result in display.compiler.compile_all(pairs, waiting=lambda s: update(f"{s:.0f} s")):
            results[places[index]] = results[places[index]][0], result
    return results


def scaling(loaded, topology: presets.Topology, display) -> dict:
    """Return a table of meshes data x fsdp on as many chips of the topology's kind, with the same batch a chip."""
    rows_per_chip = max(1, loaded.config.train.global_batch // topology.chips)
    meshes = [(data, fsdp) for fsdp in FSDP for data in DATA if _part_of(topology, data * fsdp)]
    pairs = []
    for data, fsdp in meshes:
        config = loaded.config.copy_and_resolve_references()
        config.mesh.update(dict.fromkeys(MESH_AXES, 1) | {"data": data, "fsdp": fsdp})
        config.train.global_batch = rows_per_chip * data * fsdp
        config.train.gradient_accumulation = 0
        pairs.append((config, _part_of(topology, data * fsdp)))
    found: list[Compiled | Exception] = [CompileError("not compiled")] * len(pairs)
    with display.working(f"compiling {len(pairs)} meshes of {topology.name}'s chips") as update:
        for index, result in display.compiler.compile_all(pairs, waiting=lambda s: update(f"{s:.0f} s")):
            found[index] = result
    rows = [_scaling_row(mesh, result) for mesh, result in zip(meshes, found, strict=True)]
    return {
        "title": f"{loaded.recipe} on chips like {topology.name}'s, {rows_per_chip} sequences each",
        "columns": ["Data", "Fsdp", "Chips", "Tokens/s a chip", STATE, "GiB", "Exposed", "verdict"],
        "rows": rows,
        "notes": [
            "exposed: part of the step that waits for communication; times are estimates; meshes of more "
            "chips than the largest slice of the kind in configs/topologies.py are left out"
        ],
    }


def _part_of(topology: presets.Topology, chips: int) -> presets.Topology | None:
    """Return the smallest slice of the same kind with so many chips, or a part of it; None where all are smaller."""
    same = [presets.get(name) for name, (chip, *_) in presets.SLICES.items() if chip == topology.chip]
    slice_ = min((t for t in same if t.chips >= chips), key=lambda t: t.chips, default=None)
    return slice_ and dataclasses.replace(slice_, chips=chips)


def _scaling_row(mesh: tuple[int, int], result: Compiled | Exception) -> dict:
    row = {"Data": mesh[0], "Fsdp": mesh[1], "Chips": mesh[0] * mesh[1]}
    if isinstance(result, Exception):
        return row | {"verdict": str(result)}
    found = estimate(result)
    hbm, step = found["hbm_gib"], found["step_seconds"]
    return row | {
        "Tokens/s a chip": found["tokens_per_second_per_device"] and round(found["tokens_per_second_per_device"]),
        STATE: hbm["parameters"] + hbm["optimizer"],
        "Exposed": found["exposed_communication_seconds"] / step if step else None,
        "GiB": hbm["total"], "verdict": "fits" if found["fits"] else "does not fit",
    }  # fmt: skip
