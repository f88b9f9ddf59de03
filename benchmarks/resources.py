# SPDX-License-Identifier: Apache-2.0
"""What do `small`, `medium` and `large`, dense and with experts, need on the slices that a month is planned with?

Rehearses each recipe as it is on each slice and prints a table: of a step its time, tokens a second, MFU and what of
communication nothing hides; of a chip its memory; of a host what its chips' state takes while a save is written, and
what train.offload keeps there; of the recipe's run its tokens and time, without evaluations, saves and restarts.
"""

import support

from input_pipeline.cache import cache_folder
from rehearsal import record
from rehearsal.compiler import GIB, Compiler
from rehearsal.estimate import estimate
from training.display import duration

SIZES, SLICES = ("small", "medium", "large"), ("v4-8", "v4-32", "v4-64")
CASES = [
    record.Case(f"{recipe}_{name}", recipe, name)
    for recipe in (*SIZES, *(f"{size}_moe" for size in SIZES))
    for name in SLICES
]
COLUMNS = (
    "recipe", "slice", "sequences × tokens", "step", "tokens/s", "MFU", "GiB a chip", "GiB a host", "exposed",
    "tokens of a run", "its time",
)  # fmt: skip


def cells(loaded, compiled) -> tuple[str, ...]:
    """Return a row of the table; what does not fit says what it would need."""
    train, topology, found = loaded.config.train, loaded.topology, estimate(compiled)
    batch, memory = f"{train.global_batch} × {train.sequence_length}", found["hbm_gib"]
    begin = loaded.recipe, topology.name, batch
    if not found["fits"]:
        needed = f"{memory['total']:.1f} of {memory['capacity']}"
        return *begin, "does not fit", "", "", needed, "", "", "", ""
    state = sum(compiled.facts["state"].values()) - compiled.facts["state"]["batch"]
    step, tokens = found["step_seconds"], train.steps * train.global_batch * train.sequence_length
    return (
        *begin, f"{1000 * step:.1f} ms", f"{found['tokens_per_second']:,.0f}", f"{found['mfu']:.3f}",
        f"{memory['total']:.1f}", f"{topology.chips_per_host * state / GIB:.1f}",
        f"{1000 * found['exposed_communication_seconds']:.1f} ms", f"{tokens / 1e6:,.0f} M",
        duration(train.steps * step),
    )  # fmt: skip


def main() -> None:
    """Rehearse and print."""
    cases = CASES[:1] if support.QUICK else CASES
    loaded, table = [case.load() for case in cases], {}
    compiler = Compiler(cache_folder("") / "rehearsals")
    for index, compiled in compiler.compile_all([(one.config, one.topology) for one in loaded]):
        if isinstance(compiled, Exception):
            raise compiled
        table[index] = cells(loaded[index], compiled)
        print("  ".join(table[index]), flush=True)
    rows = [table[index] for index in sorted(table)]
    for row in (COLUMNS, ("---",) * len(COLUMNS), *rows):
        print(f"| {' | '.join(row)} |")
    named = [
        ", ".join(f"{name} {cell}" for name, cell in zip(COLUMNS[2:], row[2:], strict=True) if cell) for row in rows
    ]
    support.finish("resources", {f"{row[0]} on {row[1]}": text for row, text in zip(rows, named, strict=True)})


if __name__ == "__main__":
    main()
