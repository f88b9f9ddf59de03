# SPDX-License-Identifier: Apache-2.0
"""What do `small`, `medium` and `large`, dense and with experts, need on the planned slices?

Prints a table of the recorded rehearsals, which benchmarks/record.py compares with the code. Columns: time, tokens per
second, MFU and exposed communication of a step; memory of a chip; the state of a host's chips, which the host holds
during a save; tokens and time of the recipe's run, without evaluations and saves.
"""

import json

import support

from rehearsal import record
from reporting.display import duration

SIZES = ("small", "medium", "large")
RECIPES = (*SIZES, *(f"{size}_moe" for size in SIZES))
COLUMNS = (
    "recipe", "slice", "sequences × tokens", "step", "tokens/s", "MFU", "GiB a chip", "GiB a host", "exposed",
    "tokens of a run", "its time",
)  # fmt: skip


def cases() -> list[record.Case]:
    """Return the recorded cases of these recipes, by size."""
    return sorted((case for case in record.cases() if case.recipe in RECIPES), key=lambda c: RECIPES.index(c.recipe))


def cells(case: record.Case) -> tuple[str, ...]:
    """Return a row of the table."""
    config, topology, recorded = case.load().config, case.load().topology, json.loads(case.path.read_text())
    figures, others = recorded["figures"], recorded["not_compared"]
    step, tokens = figures["step_seconds"], config.train.global_batch * config.train.sequence_length
    return (
        case.recipe, topology.name, f"{config.train.global_batch} × {config.train.sequence_length}",
        f"{1000 * step:.1f} ms", f"{tokens / step:,.0f}",
        f"{figures['flops_model'] / step / topology.peak_flops:.3f}", f"{figures['hbm_gib']:.1f}",
        f"{topology.chips_per_host * others['state_gib']:.1f}",
        f"{1000 * others['exposed_communication_seconds']:.1f} ms", f"{config.train.steps * tokens / 1e6:,.0f} M",
        duration(config.train.steps * step),
    )  # fmt: skip


def main() -> None:
    """Print the table."""
    rows = [cells(case) for case in cases()]
    for row in (COLUMNS, ("---",) * len(COLUMNS), *rows):
        print(f"| {' | '.join(row)} |")
    told = {f"{row[0]}_{row[1]}": ", ".join(map(" ".join, zip(COLUMNS[2:], row[2:], strict=True))) for row in rows}
    support.finish("resources", told)


if __name__ == "__main__":
    main()
