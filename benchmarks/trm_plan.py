# SPDX-License-Identifier: Apache-2.0
"""What does a step of the recursive model cost on a v4-64, and what fits? The 7 M attention model, batch 6,144.

A plan for this slice assumed 17 ms per step and 360,000 examples/s. Here the step is compiled by the TPU compiler, and
its schedule is replayed: an estimate, not a run. Its FLOPs take 33 ms at the chips' peak, so 17 ms are impossible.
Batch and width are doubled to the largest that fits. The estimate depends on the compiler's price of products that sum
over 512 numbers, with results in bfloat16 or float32; `peak_fraction` shows these prices, also for the width of an MLP.
`other_prices` are those of its other price list (see benchmarks/levers.py), which no other figure uses.
"""

import os
import sys

import support

from rehearsal.compiler import ON_CPU

os.environ |= ON_CPU  # before jax is imported

import jax
import jax.numpy as jnp
import rehearsed
from levers import OTHER_PRICES, option

from models import trm
from rehearsal import assumptions, hlo, record, schedule
from rehearsal.compilation import devices
from rehearsal.estimate import estimate

RECIPE, TOPOLOGY = "trm/sudoku", "v4-8" if support.QUICK else "v4-64"
BATCH, WIDTH, HEAD_DIM, MOST_DOUBLINGS = 6144, 512, 64, 1 if support.QUICK else 4
STEPS, CHIPS_A_HOST = 8138, 4


def case(batch: int, width: int) -> record.Case:
    """Return the step of the attention model."""
    heads = width // HEAD_DIM
    keys = record.ATTENDS | {
        "train.global_batch": batch, "model.embed_dim": width, "model.puzzle_dim": width, "model.mlp_dim": 3 * width,
        "model.num_heads": heads, "model.num_kv_heads": heads,
    }  # fmt: skip
    return record.Case("trm_plan", RECIPE, TOPOLOGY, keys)


def largest(name: str, sizes: list[tuple[int, int]]) -> dict[str, float]:
    """Return the figures of the largest (batch, width) that fits, from candidates in growing order."""
    best = {}
    for batch, width in sizes:
        found = rehearsed.estimated(case(batch, width))
        if not found["fits"]:
            break
        best = {
            f"largest_{name}": batch if name == "batch" else width,
            f"largest_{name}_gib_a_chip": round(found["hbm_gib"]["total"], 2),
            f"largest_{name}_step_seconds": round(found["step_seconds"], 4),
        }
        print(best, flush=True)
    return best


def peak_fraction(topology, rows: int, summed: int, columns: int, dtype, options: dict[str, str]) -> float:
    """Return the fraction of a chip's peak of the product of [rows, summed] and [summed, columns] alone."""
    chip = jax.sharding.SingleDeviceSharding(devices(topology)[0])
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=chip) for shape in ((rows, summed), (summed, columns)))
    product = jax.jit(lambda x, w: jnp.matmul(x, w, preferred_element_type=dtype)).lower(x, w).compile(options)
    given = assumptions.of_topology(topology)
    costs = schedule.replay(hlo.parse(product.as_text()), given, {"data": 1}).costs
    return 2 * rows * summed * columns / given.peak_flops / sum(c.seconds for c in costs if c.category == "matmul")


def main() -> None:
    """Compile and report."""
    loaded, found = case(BATCH, WIDTH).load(), rehearsed.estimated(case(BATCH, WIDTH))
    if not found["fits"]:
        sys.exit("the step does not fit")
    passes, step = found["seconds_by_pass"], found["step_seconds"]
    figures = {
        "step_ms": round(1000 * step, 1),
        "mfu": round(found["mfu"], 3),
        "step_ms_at_peak": round(1000 * step * found["mfu"], 1),
        **{f"{name}_ms": round(1000 * passes[name], 1) for name in ("forward", "backward", "update")},
        "exchange_ms": round(
            1000 * (found["exposed_communication_seconds"] + found["hidden_communication_seconds"]), 2
        ),
        "exposed_exchange_ms": round(1000 * found["exposed_communication_seconds"], 2),
        "examples_per_second": round(BATCH / step),
        "gib_a_chip": round(found["hbm_gib"]["total"], 2),
        "gib_a_worker": round(CHIPS_A_HOST * found["hbm_gib"]["total"], 1),
        "hours_of_the_whole_run": round(STEPS * step / 3600, 2),
    }
    model = loaded.config.model
    rows = BATCH // loaded.topology.chips * (trm.prefix_length(model) + model.max_length)
    for name, summed, columns, dtype in (
        ("up", WIDTH, 3 * WIDTH, jnp.bfloat16),
        ("up_in_float32", WIDTH, 3 * WIDTH, jnp.float32),
        ("query", WIDTH, WIDTH, jnp.bfloat16),
        ("down", 3 * WIDTH, WIDTH, jnp.bfloat16),
    ):
        for suffix, options in (("", {}), ("_other_prices", {OTHER_PRICES: "true"})):
            fraction = peak_fraction(loaded.topology, rows, summed, columns, dtype, options)
            figures[f"{name}_product_of_peak{suffix}"] = round(fraction, 2)
    repriced = rehearsed.compiler(option(OTHER_PRICES, "true")).compile(loaded.config, loaded.topology)
    figures["mfu_other_prices"] = round(estimate(repriced)["mfu"], 3)
    print(figures, flush=True)
    doublings = range(1, MOST_DOUBLINGS + 1)
    figures |= largest("batch", [(BATCH * 2**n, WIDTH) for n in doublings])
    figures |= largest("width", [(BATCH, WIDTH * 2**n) for n in doublings])
    support.finish("trm_plan", figures)


if __name__ == "__main__":
    main()
