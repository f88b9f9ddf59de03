# SPDX-License-Identifier: Apache-2.0
"""The phases of a run besides its steps, the memory that each needs with the training state, and one verdict on all.

The programs of an evaluation and of a sample of text are compiled. A checkpoint is copied from all chips of a host to
the host's memory before it is written. A restore needs at most as much there. A host's own needs are HOST_GIB.
"""

from rehearsal.compiler import EVALUATION, GIB, SAMPLE, Call, Compiled, capacity_gib
from rehearsal.sections import Section, Table

HOST_GIB = 8.0  # of the process, its libraries and the batches that it makes ahead


def rehearse(compiled: Compiled, figures: dict, display) -> dict:
    """Return what the other phases add to the report on a step: `phases`, and `fits`, the verdict on all of them.

    Args:
      figures: the report, whose `fits` is about the step, and about its rollout if it has one.
    """
    config, topology = compiled.config, compiled.topology
    names = [EVALUATION, *([SAMPLE] if writes_samples(config) else [])]
    calls = [Call(name, 1, config.model.max_length, config.inference.cache_dtype) for name in names]
    rows = [_row("step", figures["fits"], compiled.total_bytes, capacity_gib(topology))]
    what = f"compiling {' and '.join(names)} for {topology.name}"
    for index, result in display.compile_all([(config, topology, call) for call in calls], what):
        if isinstance(result, Exception):
            raise result
        total = result.total_bytes + beside(compiled, result)
        rows.append(_row(names[index], result.fits, total, capacity_gib(topology)))
    rows.sort(key=lambda row: ["step", *names].index(row["phase"]))
    on_chip = _state_bytes(compiled) - compiled.facts["on_host"]
    on_host = topology.chips_per_host * _state_bytes(compiled) + HOST_GIB * GIB
    rows += [
        _row(name, True, on_chip, capacity_gib(topology), on_host, topology.host_gib) for name in ("save", "restore")
    ]
    return {"phases": rows, "fits": all(row["fits"] for row in rows)}


def writes_samples(config) -> bool:
    """Return whether evaluation ends with a sample of text."""
    return bool(config.evaluation.sample_tokens) and config.model.name == "decoder_lm"


def beside(compiled: Compiled, phase: Compiled) -> float:
    """Return the bytes of a chip's training state that are no argument of a phase's program."""
    return max(0.0, _state_bytes(compiled) - compiled.facts["on_host"] - phase.facts["state"]["weights"])


def _state_bytes(compiled: Compiled) -> float:
    """Return the bytes of a chip's parameters, optimizer and frozen models, also those in its host's memory."""
    return compiled.state_bytes + compiled.facts["frozen"]


def _row(
    phase: str, fits: bool, chip: float, chip_gib: float | None, host: float | None = None,
    host_gib: float | None = None,
) -> dict:  # fmt: skip
    """Return the verdict on a phase, given the bytes that it needs; a capacity that is unknown does not decide it."""
    fits &= chip_gib is None or chip <= chip_gib * GIB
    fits &= host is None or host_gib is None or host <= host_gib * GIB
    return {
        "phase": phase, "fits": fits, "chip_gib": chip / GIB, "host_gib": None if host is None else host / GIB,
        "chip_capacity_gib": chip_gib, "host_capacity_gib": host_gib,
    }  # fmt: skip


def sections(report: dict) -> list[Section]:
    """Return the table of the phases, with the verdict; [] for a report without them."""
    if not (phases := report.get("phases")):
        return []
    fits = all(row["fits"] for row in phases)
    rows = [
        (row["phase"], _of(row["chip_gib"], row["chip_capacity_gib"]),
         _of(row["host_gib"], row["host_capacity_gib"]) if row["host_gib"] else "-",
         "fits" if row["fits"] else "does not fit")
        for row in phases
    ]  # fmt: skip
    worst = ", ".join(row["phase"] for row in phases if not row["fits"])
    title = "FITS: every phase of the run" if fits else f"DOES NOT FIT: {worst}"
    return [Section(title, [], (Table(("phase", "GiB a chip", "GiB a host", "verdict"), rows),), bad=not fits)]


def _of(needed: float, capacity: float | None) -> str:
    return f"{needed:.1f}" + (f" of {capacity:.0f}" if capacity else "")
