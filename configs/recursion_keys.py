# SPDX-License-Identifier: Apache-2.0
"""The keys of training a recursive model, and of solving puzzles with it; configs/base.py adds them to its own."""

from configs.key import READ, RESUME, UNCOMPILED, Key, Section

KEYS: dict[str, Key] = {}  # by dotted name

supervision = Section(KEYS, "supervision")  # of the objective "recursive"
supervision.max_steps = Key(16, "most steps on a puzzle in training; steps in evaluation", above=0, most=10_000)
supervision.exploration = Key(0.1, "probability that a step sets a random minimum number of steps for a puzzle", most=1)
supervision.final_exploration = Key(
    -1.0, "supervision.exploration of the last step, which it approaches by the same amount each step; -1: it stays",
    most=1, also=-1,
)  # fmt: skip
supervision.first_high_cycles = Key(
    0, "model.high_cycles of the first step, which grow to their number by growth_fraction; 0: no growth", most=1_000
)
supervision.first_low_cycles = Key(0, "model.low_cycles of the first step; as first_high_cycles", most=1_000)
supervision.growth_fraction = Key(0.2, "fraction of the steps after which the cycles are complete", above=0, most=1)
supervision.label_smoothing = Key(0.0, "part of a cell's target that is spread evenly over all tokens", below=1)
supervision.random_start = Key(
    0.0, "deviation of random initial latents, for each puzzle and position (EqR: 1); 0: two constant vectors", most=1e6
)
supervision.path_noise = Key(
    0.0, "deviation of the noise that training adds to a latent at each of its updates (EqR: 0.01)", most=1e6
)
supervision.parallel = Key(
    1, "latents of a puzzle that are trained in parallel, with the gradient through the best alone", above=0, most=1_000
)
supervision.loss = Key("stablemax", "loss of a cell: cross-entropy of this function", choices=("stablemax", "softmax"))

inference = Section(KEYS, "inference", RESUME | READ | UNCOMPILED)  # of a recursive model, see docs/puzzles.md
inference.trajectories = Key(1, "answers to a puzzle, each from its own noise; one is chosen", above=0, most=100_000)
inference.supervision_steps = Key(0, "steps on a puzzle; 0: supervision.max_steps", most=10_000)
inference.noise = Key(
    1.0, "deviation of the noise on the latents before each step, in all trajectories but the first", most=1e6
)
inference.random_start = Key(
    -1.0, "deviation of random initial latents in all trajectories but the first; -1: each begins as in training",
    also=-1, most=1e6,
)  # fmt: skip
inference.choice = Key(
    "weighted_vote", "which answer is chosen: the likeliest to halt, the most frequent one (weighted by that or not), "
    "the one whose latents change least",
    choices=("q_head", "vote", "weighted_vote", "convergence"),
)  # fmt: skip
inference.puzzles = Key(
    1024, "held-out puzzles of the table of accuracy by depth and breadth, at the end of a run; 0: no table",
)  # fmt: skip
