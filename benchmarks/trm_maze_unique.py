# SPDX-License-Identifier: Apache-2.0
"""Does a recursive model learn mazes of 10 x 10 with one path on a laptop, and does recursion pay there?

The recipe configs/trm/maze_unique.py with a quarter of its width, fewer cycles, Muon, and a convolution that reaches
the rows above and below a cell, which attention alone does not find in this time. It solves each maze once, and then
again with TRAJECTORIES noisy trajectories and a weighted vote, which needs neither training nor labels. A transformer
that answers in one pass, with as many parameters, is trained on the same mazes for as many FLOPs. The folders
runs/benchmark-trm_maze_unique-* stay, so that the same command continues after an interruption.
"""

import support

STEPS = 12 if support.QUICK else 2000
DEPTH, TRAJECTORIES, NOISE = 8, 2 if support.QUICK else 16, 0.3
AIM = 95.0  # percent
MAZES = {
    "data.puzzle_size": 10, "data.puzzle_min_difficulty": 0, "data.puzzle_heldout": 100 if support.QUICK else 500,
    "data.puzzle_augmentations": 8, "model.max_length": 100, "train.sequence_length": 100,
    "model.dtype": "float32", "model.embed_dim": 32, "model.mlp_dim": 128, "model.num_heads": 2,
    "model.num_kv_heads": 2, "model.convolution": 21,
    "train.global_batch": 64, "train.eval_every": STEPS // 4, "evaluation.batches": 2,
    "optimizer.name": "muon", "optimizer.learning_rate": 1e-2, "optimizer.warmup_steps": 100,
    "optimizer.weight_decay": 0.1, "optimizer.ema_decay": 0.99, "optimizer.final_fraction": 0.1,
}  # fmt: skip
RECURSIVE = {
    "model.high_cycles": 2, "model.low_cycles": 3, "supervision.max_steps": DEPTH, "inference.supervision_steps": DEPTH,
    "inference.trajectories": TRAJECTORIES, "inference.noise": NOISE, "inference.random_start": 1.0,
    "inference.choice": "weighted_vote", "inference.puzzles": MAZES["data.puzzle_heldout"],
}  # fmt: skip
ONE_PASS = {
    "model.low_latents": 0, "model.low_cycles": 0, "model.high_cycles": 1, "model.update_rate": 1.0,
    "supervision.max_steps": 1, "supervision.random_start": 0.0, "supervision.path_noise": 0.0, "inference.puzzles": 0,
}  # fmt: skip
CALLS_PER_STEP = 2 * 4 + 2 * 4  # of the recursive step, a backward pass being two; one pass has 1 + 2


def trained(name: str, keys: dict) -> support.TrainRun:
    """Train an arm, or go on with it."""
    return support.train(MAZES | keys, "configs/trm/maze_unique.py", workdir=support.folder(f"trm_maze_unique-{name}"))


def by_vote(run: support.TrainRun) -> float:
    """Return the percentage of the same mazes that a weighted vote of all trajectories solves at the trained depth."""
    row = rf"{DEPTH}" + r"(?: +[\d.]+%){3} +([\d.]+)%"  # after alone, q_head and vote
    return run.figure(rf"weighted_vote[^\n]*\n(?: +\d+ [^\n]*\n)* +{row}")


def main() -> None:
    """Train both, and judge."""
    recursive = trained("recursive", RECURSIVE | {"train.steps": STEPS})
    steps = STEPS * CALLS_PER_STEP // 3
    one_pass = trained("one-pass", ONE_PASS | {"train.steps": steps, "train.eval_every": steps // 4})
    solved = by_vote(recursive)
    support.judge(
        "trm_maze_unique",
        {
            "exact": recursive.exact, "steps": STEPS, "minutes": round(recursive.minutes, 1),
            "exact_of_trajectories": solved, "trajectories": TRAJECTORIES,
            "parameters": recursive.parameters,
            "one_pass_exact": one_pass.exact, "one_pass_steps": steps,
            "one_pass_minutes": round(one_pass.minutes, 1),
            "one_pass_parameters": one_pass.parameters,
        },
        f"{solved} % of the mazes are solved, where {AIM} % were the aim" if solved < AIM else "",
    )  # fmt: skip


if __name__ == "__main__":
    main()
