# SPDX-License-Identifier: Apache-2.0
"""What do the optimizations gain? The same 1B model on v4-8 as configured, and without each of them.

The naive step uses float32, attention with all scores in memory, all logits at once, no rematerialization, and
replicates weights and optimizer on each chip. Its products have JAX's default precision, as naive code has. It does not
fit on this slice, so each optimization is also removed alone. All variants are compiled by the TPU compiler, and its
schedule is replayed: the times are estimates. For each variant the batch is doubled from one sequence per chip to the
largest that fits.
"""

import support

import rehearsed
from rehearsal import record
from rehearsal.layouts import ways

RECIPE, TOPOLOGY, LENGTH = "llama_1b", "v4-8", 2048
MOST_ROWS = 64  # a chip; more than fits
NAIVE = ways.NAIVE | {"mesh.data": 4, "mesh.fsdp": 1}
WAYS = {
    "optimised": {},
    "naive": NAIVE,
    "naive_state_sharded": NAIVE | {"mesh.data": 1, "mesh.fsdp": 4},
    "naive_bfloat16_remat": NAIVE | {"model.dtype": "bfloat16", "model.remat": "full"},
}


def estimated(name: str, rows: int) -> dict:
    """Return the estimate of a variant with this number of sequences per chip."""
    keys = {"train.sequence_length": LENGTH, "train.global_batch": 4 * rows, "train.gradient_accumulation": 1}
    precision = "" if name == "optimised" else ways.NAIVE_PRECISION
    return rehearsed.estimated(record.Case(name, RECIPE, TOPOLOGY, keys | WAYS[name]), precision)


def largest(name: str) -> tuple[int, dict]:
    """Return (sequences per chip, estimate) of the largest batch that fits, else of one sequence."""
    rows, best = 1, None
    while rows <= MOST_ROWS:
        found = estimated(name, rows)
        if best is None or found["fits"]:
            best = rows, found
        if not found["fits"]:
            break
        rows *= 2
    return best


def main() -> None:
    """Compile all variants and compare."""
    figures, found = {}, {}
    for name in WAYS:
        rows, found[name] = largest(name)
        one = found[name]
        figures |= {f"{name}_fits": one["fits"], f"{name}_rows_a_chip": rows,
                    f"{name}_gib_a_chip": round(one["hbm_gib"]["total"], 1)}  # fmt: skip
        if one["fits"]:
            figures |= {
                f"{name}_step_seconds": round(one["step_seconds"], 3),
                f"{name}_tokens_per_second": round(one["tokens_per_second"]),
                f"{name}_steps_an_hour_of_32k_tokens": round(3600 * one["tokens_per_second"] / 32_768),
            }
        print(f"{name}: {rows} sequences a chip, {figures}", flush=True)
    for name in list(WAYS)[1:]:
        one, rows = found[name], figures[f"{name}_rows_a_chip"]
        memory = estimated("optimised", rows)["hbm_gib"]["total"]
        figures[f"times_less_memory_than_{name}"] = round(one["hbm_gib"]["total"] / memory, 2)
        if one["fits"]:
            times = found["optimised"]["tokens_per_second"] / one["tokens_per_second"]
            figures[f"times_faster_than_{name}"] = round(times, 2)
    support.finish("naive", figures)


if __name__ == "__main__":
    main()
