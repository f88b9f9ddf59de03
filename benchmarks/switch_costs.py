# SPDX-License-Identifier: Apache-2.0
"""What does each ENABLE_* switch cost on a slice of TPUs, and is ENABLE_TPU_OPT alone ever slower than the recipe?

Rehearses `small` on v4-8 (`--quick`: the same with one narrow layer) by scripts/deploy_optimizations.py --ahead: naive,
as `launch` trains it, with ENABLE_TPU_OPT alone, with the four switches that are on by default, and without each of the
others. All are compiled by the TPU compiler, and its schedule is replayed: the times are estimates.
"""

import json
import pathlib
import sys
import tempfile

import support

SCRIPT = support.ROOT / "scripts" / "deploy_optimizations.py"
FLAGS = ("--model-size=small", "--disable-evolution", "--topology=v4-8", "--ahead")
NARROW = {
    "model.num_layers": 1, "model.embed_dim": 64, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 128,
    "model.vocab_size": 512, "train.sequence_length": 128, "train.global_batch": 8,
}  # fmt: skip


def main() -> None:
    """Rehearse, and fail if ENABLE_TPU_OPT alone is slower than `launch`, or needs more memory."""
    narrow = support.typed(NARROW) if support.QUICK else []
    with tempfile.TemporaryDirectory() as folder:
        support.run(SCRIPT, *FLAGS, *narrow, cwd=folder)
        report = json.loads(pathlib.Path(folder, "optimization_deployment_report.json").read_text())
    figures, rehearsed = {}, report["rehearsed"]
    for name, one in rehearsed["ways"].items():
        words = name.lower().replace(" ", "_")
        if one.get("step_seconds"):
            figures[f"{words}_step_ms"] = round(1000 * one["step_seconds"], 3)
        figures[f"{words}_gib_a_chip"] = round(one["memory_gib_per_device"], 3)
    for name, compared in rehearsed["factors"].items():
        for factors in compared:
            for what in ("times_faster", "times_less_memory"):
                if factors[what]:
                    figures[f"{name.lower()}_{what}_than_{factors['baseline']}"] = round(factors[what], 2)
    support.finish("switch_costs", figures)
    alone = rehearsed["factors"]["ENABLE_TPU_OPT"][-1]
    if min(alone["times_faster"], alone["times_less_memory"]) < 1:
        sys.exit(f"ENABLE_TPU_OPT alone costs something: {alone}")


if __name__ == "__main__":
    main()
