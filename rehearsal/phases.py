# SPDX-License-Identifier: Apache-2.0
"""The phases of a run besides its steps, the memory that each needs with the training state, and one verdict on all.

The programs of an evaluation and of a sample of text are compiled. A checkpoint is copied from all chips of a host to
the host's memory before it is written. A restore needs at most as much there. A host's own needs are HOST_GIB.
"""

from rehearsal.compiler import EVALUATION, GIB, SAMPLE, Call, Compiled, in_order
from rehearsal.sections import Section, Table

HOST_GIB = 8.0  # of the process, its libraries and the batches that it makes ahead


def rehearse(compiled: Compiled, figures: dict, display) -> dict:
    """Return what the other phases add to the report on a step: `phases`, and `fits`, the verdict on all of them.

    `figures` is that report. Its `fits` is about the step, and about its rollout if it has one.
    """
    config, topology = compiled.config, compiled.topology
    writes_samples = config.evaluation.sample_tokens and config.model.name == "decoder_lm"
    names = [EVALUATION, SAMPLE] if writes_samples else [EVALUATION]
    wanted = [
        (config, topology, Call(name, 1, config.model.max_length, config.inference.cache_dtype)) for name in names
    ]
    programs = in_order(display.compile_all(wanted, f"compiling {' and '.join(names)} for {topology.name}"))
    rows = [_row(topology, "step", figures["fits"], compiled.total_bytes)]
    on_chip = compiled.state_bytes + compiled.facts["frozen"]
    for name, program in zip(names, programs, strict=True):
        resident = max(0.0, on_chip - program.facts["state"]["weights"])  # what is not an argument of the program
        rows.append(_row(topology, name, program.fits, program.total_bytes + resident))
    on_host = topology.chips_per_host * (on_chip + compiled.facts["on_host"]) + HOST_GIB * GIB
    rows += [_row(topology, name, True, on_chip, on_host) for name in ("save", "restore")]
    return {"phases": rows, "fits": all(row["fits"] for row in rows)}


def _row(topology, phase: str, fits: bool, chip: float, host: float | None = None) -> dict:
    """Return the verdict on a phase, given the bytes that it needs; an unknown memory of a host does not decide."""
    chip_gib, host_gib = topology.capacity_gib, None if host is None else topology.host_gib
    fits &= chip <= chip_gib * GIB
    fits &= host_gib is None or host <= host_gib * GIB
    return {
        "phase": phase, "fits": fits, "chip_gib": chip / GIB, "host_gib": None if host is None else host / GIB,
        "chip_capacity_gib": chip_gib, "host_capacity_gib": host_gib,
    }  # fmt: skip


def sections(report: dict) -> list[Section]:
    """Return the table of the phases, with the verdict; [] for a report without them."""
    if not (phases := report.get("phases")):
        return []
    rows = [
        (row["phase"], _of(row["chip_gib"], row["chip_capacity_gib"]),
         _of(row["host_gib"], row["host_capacity_gib"]) if row["host_gib"] else "-",
         "fits" if row["fits"] else "does not fit")
        for row in phases
    ]  # fmt: skip
    worst = ", ".join(row["phase"] for row in phases if not row["fits"])
    title = f"DOES NOT FIT: {worst}" if worst else "FITS: every phase of the run"
    return [Section(title, [], (Table(("phase", "GiB a chip", "GiB a host", "verdict"), rows),), bad=bool(worst))]


def _of(needed: float, capacity: float | None) -> str:
    return f"{needed:.1f}" + (f" of {capacity:.0f}" if capacity else "")
