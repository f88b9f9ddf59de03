# SPDX-License-Identifier: Apache-2.0
"""What do the recipes after the paper cost on TPUs? Hours and chip-hours of each whole run.

Each step is compiled by the TPU compiler and its schedule is replayed: an estimate, not a run. Evaluating the 422,786
held-out boards of Sudoku-Extreme at a breadth and depth is estimated from its FLOPs, at the fraction of the peak that
the training step has. `--quick` compiles one recipe for one slice.
"""

import support

import rehearsed
from models import trm
from rehearsal import assumptions, record
from settings.resolving import Loaded

RECIPES = ("sudoku_fast",) if support.QUICK else ("sudoku_fast", "sudoku_equilibrium", "maze_unique", "arc_urm")
TOPOLOGIES = ("v4-8",) if support.QUICK else ("v4-8", "v4-32", "v4-64")
STEPS = {  # of the published schedules
    "sudoku_fast": 36_000, "sudoku_equilibrium": 65_104, "maze_unique": 100_000, "arc_urm": 1_038_000,
}  # fmt: skip
BOARDS = 422_786
EVALUATIONS = {"breadth_16_depth_16": (16, 16), "breadth_128_depth_64": (128, 64)}


def evaluation_hours(loaded: Loaded, mfu: float, breadth: int, depth: int) -> float:
    """Return the hours of all held-out boards; a call without gradient is a third of one with it."""
    model, cells = loaded.config.model, loaded.config.train.sequence_length
    calls = model.high_cycles
    share = calls / (calls + 2 * trm.num_gradient_cycles(model))  # of the FLOPs of a training step
    flops = share * trm.flops_per_token(model, cells) * cells * BOARDS * breadth * depth
    return flops / (loaded.topology.chips * assumptions.of_topology(loaded.topology).peak_flops * mfu) / 3600


def main() -> None:
    """Compile and report."""
    figures = {}
    for recipe in RECIPES:
        for topology in TOPOLOGIES:
            name = f"{recipe}_{topology}"
            case = record.Case(name, f"trm/{recipe}", topology)
            loaded, found = case.load(), rehearsed.estimated(case)
            if not found["fits"]:
                print(f"{recipe} does not fit {topology}: {found['hbm_gib']['total']:.1f} GiB a chip", flush=True)
                figures[f"{name}_gib"] = round(found["hbm_gib"]["total"], 1)
                continue
            chips, hours = loaded.topology.chips, STEPS[recipe] * found["step_seconds"] / 3600
            figures |= {
                f"{name}_step_ms": round(1000 * found["step_seconds"], 1), f"{name}_hours": round(hours, 2),
                f"{name}_chip_hours": round(chips * hours, 1), f"{name}_mfu": round(found["mfu"], 3),
                f"{name}_dollars": round(chips * hours * (loaded.topology.price_per_chip_hour or 0)),
            }  # fmt: skip
            if recipe.startswith("sudoku"):
                for what, (breadth, depth) in EVALUATIONS.items():
                    cost = evaluation_hours(loaded, found["mfu"], breadth, depth)
                    figures[f"{name}_{what}_chip_hours"] = round(chips * cost, 1)
            print({key: value for key, value in figures.items() if key.startswith(name)}, flush=True)
    support.finish("trm_costs", figures)


if __name__ == "__main__":
    main()
