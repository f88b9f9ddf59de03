# SPDX-License-Identifier: Apache-2.0
"""Does a recursive model learn Sudokus on a laptop, and does recursion pay?

The first run is the recipe configs/trm/sudoku_mini.py. Then a transformer that answers in one pass is trained on the
same boards for the same time; it has three times as many blocks of half the width, so about as many parameters. When it
solves MASTERED of the held-out boards or more, both continue with harder boards. The share of held-out boards with
every cell right is compared.
"""

import statistics

import support

PROBE_STEPS = 10 if support.QUICK else 60
SKIPPED = 5  # first steps, that say nothing of the speed
MASTERED = 90.0  # percent
FEWEST = {"data.puzzle_clues": 0}  # as leave one solution
SIX = {"data.puzzle_size": 6, "model.vocab_size": 8, "model.max_length": 36, "train.sequence_length": 36}
BOARDS = {"4x4 with 6 clues": {}, "4x4 with the fewest clues": FEWEST, "6x6 with the fewest clues": SIX | FEWEST}
ONE_PASS = {
    "model.num_layers": 6, "model.embed_dim": 64, "model.num_heads": 4, "model.num_kv_heads": 4, "model.mlp_dim": 256,
    "model.mixer": "attention", "model.positions": "rope", "model.low_latents": 0, "model.low_cycles": 0,
    "model.high_cycles": 1, "supervision.max_steps": 1, "train.eval_every": 1000,
}  # fmt: skip


def trained(keys: dict) -> support.TrainRun:
    """Run the recipe with some keys changed."""
    quick = {"train.steps": 20, "data.puzzle_heldout": 50} if support.QUICK else {}
    return support.train(quick | keys, "configs/trm/sudoku_mini.py")


def training_seconds(run: support.TrainRun) -> float:
    """Return the seconds of all steps."""
    steps = run.lines["train"]
    return max(steps) * statistics.median(line["step_seconds"] for step, line in steps.items() if step > SKIPPED)


def main() -> None:
    """Train both on harder and harder boards, and print."""
    mini = None
    for name, boards in BOARDS.items():
        recursive = trained(boards)
        mini = mini or recursive
        keys = boards | ONE_PASS
        probe = trained(keys | {"train.steps": PROBE_STEPS, "train.log_every": 1})
        steps = round(PROBE_STEPS * training_seconds(recursive) / training_seconds(probe))
        one_pass = trained(keys | {"train.steps": steps})
        print(f"{name}: {recursive.exact}% recursive, {one_pass.exact}% in one pass", flush=True)
        if one_pass.exact < MASTERED:
            break
    support.finish(
        "trm_sudoku",
        {
            "exact": mini.exact,
            "minutes": round(mini.seconds / 60, 1),
            "hard": name,
            "exact_hard": recursive.exact,
            "one_pass_hard": one_pass.exact,
            "one_pass_steps_hard": steps,
            "minutes_hard": round(recursive.seconds / 60, 1),
            "one_pass_minutes_hard": round(one_pass.seconds / 60, 1),
            "parameters": recursive.parameters,
            "one_pass_parameters": one_pass.parameters,
        },
    )


if __name__ == "__main__":
    main()
