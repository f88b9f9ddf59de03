# SPDX-License-Identifier: Apache-2.0
"""Does a small model learn as well with quantized products, and how much faster would the step of a 1B model be?

Prints the loss curves of bfloat16, int8 and fp8 with the same seed and data, and the held-out losses. If one is farther
from bfloat16's than stated, the benchmark ends with an error. Steps are rehearsed on a slice that multiplies int8
faster: rounding may cost more memory traffic than the products gain.
"""

import itertools

import support

import rehearsed
from rehearsal import record
from rehearsal.estimate import estimate

STEPS, RECIPE, SLICES = (10, "tiny", ("v5e-8",)) if support.QUICK else (100, "llama_1b", ("v5e-8", "v6e-8"))
STATED = {"none": 0.0, "int8": 0.01, "fp8": 0.02}  # nats a token from the held-out loss of bfloat16
CHANGES = {"train.global_batch": "64", "model.remat": "full"}  # so that the 1B model fits a v5e-8


def trained(quantization: str) -> dict[str, dict[int, dict]]:
    """Return the lines of metrics of the tiny recipe with a quarter of its batch."""
    keys = {"model.quantization": quantization, "model.dtype": "bfloat16"}
    return support.train(support.QUIET | keys | {"train.steps": STEPS, "train.global_batch": 8}).lines


def figures_of_steps() -> dict[str, float]:
    """Return the estimated seconds of a step and of its products, and its memory, in bfloat16 and in int8."""
    cases, figures = [], {}
    for topology, quantization in itertools.product(SLICES, ("none", "int8")):
        name = f"{RECIPE}_{topology.replace('-', '_')}_{quantization}"
        cases.append(record.Case(name, RECIPE, topology, CHANGES | {"model.quantization": quantization}))
    for case, compiled in rehearsed.compiled(cases):
        found = estimate(compiled)
        figures |= {
            f"{case.name}_step_seconds": round(found["step_seconds"], 4),
            f"{case.name}_matmul_seconds": round(found["seconds_by_category"]["matmul"], 4),
            f"{case.name}_gib": round(found["hbm_gib"]["total"], 2),
        }
    return figures


def main() -> None:
    """Train with each type, print the table, rehearse."""
    runs = {quantization: trained(quantization) for quantization in STATED}
    print("\nnats a token\n" + "".join(f"{head:>10}" for head in ("step", "bfloat16", *list(STATED)[1:])))
    for step in runs["none"]["train"]:
        print(f"{step:10}" + "".join(f"{run['train'][step]['loss']:10.4f}" for run in runs.values()))
    heldout = {quantization: run["eval"][STEPS]["eval_loss"] for quantization, run in runs.items()}
    print("  held-out" + "".join(f"{loss:10.4f}" for loss in heldout.values()))
    missed = [name for name, loss in heldout.items() if abs(loss - heldout["none"]) > STATED[name]]
    figures = {"steps": STEPS, "bfloat16_loss": round(heldout.pop("none"), 4)}
    figures |= {f"{name}_loss": round(loss, 4) for name, loss in heldout.items()}
    says = missed and f"further from bfloat16 than stated: {', '.join(missed)}"
    support.judge("quantization", figures | figures_of_steps(), says)


if __name__ == "__main__":
    main()
