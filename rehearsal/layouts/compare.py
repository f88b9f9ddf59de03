# SPDX-License-Identifier: Apache-2.0
"""Compares one configuration on several slices: the cost per token, and how throughput per chip scales."""

import dataclasses
from collections.abc import Callable

from configs import topologies as presets
from configs.base import MESH_AXES
from configs.errors import ConfigError
from rehearsal import report, rollout
from rehearsal.compiler import Compiled, CompileError
from rehearsal.report import COST, STATE
from settings import validation
from settings.resolving import Loaded

DATA, FSDP = (1, 2, 4, 8), (1, 2, 4)


def slices(load: Callable[[str], Loaded], wanted: list[presets.Topology], display) -> dict:
    """Return a table of topologies, the cheapest per token first; a topology that cannot run it has the reason.

    `load` returns the configuration for the name of a topology.
    """
    results, pairs, of_topology = {}, [], {}
    for topology in wanted:
        loaded = of_topology[topology.name] = load(topology.name)
        try:
            validation.validate(loaded.config, topology.chips, loaded)
            pairs.append((loaded.config, topology))
        except ConfigError as error:
            results[topology.name] = error
    if not pairs:
        raise results[wanted[0].name]
    for index, result in display.compile_all(pairs, f"compiling for {', '.join(t.name for _, t in pairs)}"):
        results[pairs[index][1].name] = result
    rows = [
        {"topology": t.name, "Chips": t.chips} | _row(of_topology[t.name], results[t.name], display) for t in wanted
    ]
    rows.sort(key=_cheapest_first)
    cheapest = rows[0]["topology"] if rows[0].get(COST) is not None else None
    note = f"the cheapest per token: {cheapest}" if cheapest else "none fits at a known price"
    return {
        "title": f"{loaded.recipe} on {len(rows)} slices, the cheapest per token first",
        "columns": ["topology", "Chips", "verdict", "GiB", "A step", "MFU", "Tokens/s", COST, "A run", "$ a run"],
        "rows": rows,
        "best": cheapest,
        "notes": [
            f"{note}; list prices of {presets.PRICES_AS_OF} unless --price is given; times are estimates",
            *(f"without a cost, {line}" for line in report.notes_on(rows)),
        ],
    }


def _row(loaded: Loaded, result: Compiled | Exception, display) -> dict:
    """Return the row of a topology. With an objective that draws answers, a step includes its rollout."""
    row = report.row(result)
    if not row.get("update alone"):
        return row
    figures, without_cost = report.figures(loaded, result), row | dict.fromkeys((COST, "A run", "$ a run"))
    try:
        both = rollout.rehearse(loaded, result, figures, display)
    except (CompileError, ConfigError) as error:
        return without_cost | {"verdict": str(error)}
    return row | rollout.row(figures | both) if both else without_cost


def _cheapest_first(row: dict) -> tuple:
    """Return the key to sort by: an unknown cost comes last, and of equal costs, such as $0, the faster first."""
    cost = row.get(COST)
    return cost is None, cost or 0.0, -(row.get("Tokens/s") or 0.0)


def scaling(loaded, topology: presets.Topology, display) -> dict:
    """Return a table of data x fsdp meshes on slices of the topology's kind, with a constant batch per chip.

    Raises:
      ConfigError: the configuration is not valid, or has a key that this sets.
    """
    if own := [key for key in loaded.typed if key.startswith("mesh.") or key == "train.gradient_accumulation"]:
        raise ConfigError(f"--scaling chooses {own[0]} itself; omit --config.{own[0]}")
    rows_per_chip = max(1, loaded.config.train.global_batch // topology.chips)
    meshes = [(data, fsdp) for fsdp in FSDP for data in DATA if _part_of(topology, data * fsdp)]
    pairs = []
    for data, fsdp in meshes:
        config = loaded.config.copy_and_resolve_references()
        config.mesh.update(dict.fromkeys(MESH_AXES, 1) | {"data": data, "fsdp": fsdp})
        config.train.global_batch = rows_per_chip * data * fsdp
        config.train.gradient_accumulation = 0
        pairs.append((config, _part_of(topology, data * fsdp)))
    validation.validate(pairs[0][0], 1, loaded)  # of one chip; the row of a larger mesh has its error
    results = dict(display.compile_all(pairs, f"compiling {len(pairs)} meshes of {topology.name}'s chips"))
    rows = [
        {"Data": data, "Fsdp": fsdp, "Chips": data * fsdp} | report.row(results[n])
        for n, (data, fsdp) in enumerate(meshes)
    ]
    return {
        "title": f"{loaded.recipe} on chips like {topology.name}'s, {rows_per_chip} sequences each",
        "columns": ["Data", "Fsdp", "Chips", "Tokens/s a chip", STATE, "GiB", "Exposed", "verdict"],
        "rows": rows,
        "notes": [
            "exposed: part of the step that waits for communication; times are estimates; meshes of more "
            "chips than the largest slice of the kind in configs/topologies.py are left out",
            *report.notes_on(rows),
        ],
    }


def _part_of(topology: presets.Topology, chips: int) -> presets.Topology | None:
    """Return the smallest slice of the same kind with `chips` chips, or a part of it; None if all are smaller."""
    same = [presets.get(name) for name, (chip, *_) in presets.SLICES.items() if chip == topology.chip]
    slice_ = min((t for t in same if t.chips >= chips), key=lambda t: t.chips, default=None)
    same_price = {"price_per_chip_hour": topology.price_per_chip_hour}
    return slice_ and dataclasses.replace(slice_, chips=chips, **same_price)
