# SPDX-License-Identifier: Apache-2.0
"""Does a recursive model learn Sudokus on a laptop, and does recursion pay?

The first run is the recipe configs/trm/sudoku_mini.py as it stands, on boards of 4 x 4. The second is on boards of
6 x 6 with as few clues as leave one solution, the same model; and so is the third, by a transformer that answers in one
pass: three times as many blocks of half the width, so about as many parameters, trained as long by the clock. What is
compared is the share of held-out boards with every cell right.
"""

import statistics

import support

MINI = "--config=configs/trm/sudoku_mini.py"
STEPS, PROBE_STEPS = (20, 10) if support.QUICK else (3000, 60)
SKIPPED = 5  # first steps, that say nothing of the speed
HARD = {
    "data.puzzle_size": 6, "model.vocab_size": 8, "model.max_length": 36, "train.sequence_length": 36,
    "train.eval_every": 500, "train.log_every": 1, "data.puzzle_heldout": 50 if support.QUICK else 1000,
}  # fmt: skip
ONE_PASS = {
    "model.num_layers": 6, "model.embed_dim": 64, "model.num_heads": 4, "model.num_kv_heads": 4, "model.mlp_dim": 256,
    "model.mixer": "attention", "model.positions": "rope", "model.low_latents": 0, "model.low_cycles": 0,
    "model.high_cycles": 1, "supervision.max_steps": 1,
}  # fmt: skip


def trained(keys: dict) -> support.TrainRun:
    """Run the recipe with other values of some keys."""
    return support.train([MINI, *[f"--config.{key}={value}" for key, value in keys.items()]])


def exact(run: support.TrainRun) -> float:
    """Return the percentage of held-out boards that are solved in the end."""
    return run.figure(r"held-out exact: ([\d.]+)%")


def step_seconds(run: support.TrainRun) -> float:
    """Return what a step takes."""
    return statistics.median(line["step_seconds"] for step, line in run.lines["train"].items() if step > SKIPPED)


def main() -> None:
    """Train all three and print."""
    mini = trained({"train.steps": STEPS} if support.QUICK else {})
    hard = trained(HARD | {"train.steps": STEPS})
    probe = trained(HARD | ONE_PASS | {"train.steps": PROBE_STEPS})
    one_pass_steps = round(STEPS * step_seconds(hard) / step_seconds(probe))
    one_pass = trained(HARD | ONE_PASS | {"train.steps": one_pass_steps})
    support.finish(
        "trm_sudoku",
        {
            "exact": exact(mini),
            "minutes": round(mini.seconds / 60, 1),
            "exact_hard": exact(hard),
            "one_pass_hard": exact(one_pass),
            "steps_hard": STEPS,
            "one_pass_steps_hard": one_pass_steps,
            "minutes_hard": round(hard.seconds / 60, 1),
            "one_pass_minutes_hard": round(one_pass.seconds / 60, 1),
            "parameters": hard.figure(r"Parameters: ([\d,]+)"),
            "one_pass_parameters": one_pass.figure(r"Parameters: ([\d,]+)"),
        },
    )


if __name__ == "__main__":
    main()
