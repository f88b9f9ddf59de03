# SPDX-License-Identifier: Apache-2.0
"""The Tiny Recursive Model on Sudoku-Extreme, trained so that its latents converge: random initial latents, noise on
their path, and updates of 95 % (Equilibrium Reasoners, arXiv:2605.21488: 99.79 % exact with depth 64 and breadth 128).

The published evaluation chooses by convergence. Its noise is part of every update; here it comes before each step.
Expected: not yet run.
Cost: 65,104 steps. Rehearsed, at the list price of a v4: on v4-8 91 min (83 ms a step), $19; on v4-32 23 min, $20; on
v4-64 13 min, $22. All 422,786 test boards with breadth and depth 16: 8 to 9 chip-hours; with 128 and 64: 250 to 285.
Command: python train.py --config=configs/trm/sudoku_equilibrium.py --topology=v4-64 --config.data.path=FOLDER_WITH_CSV
"""

from configs.trm import sudoku


def get_config():
    config = sudoku.get_config()
    config.model.puzzle_dim = 0
    config.model.update_rate = 0.95
    config.supervision.random_start = 1.0
    config.supervision.path_noise = 0.01
    config.train.global_batch = 768
    config.inference.trajectories = 128
    config.inference.supervision_steps = 64
    config.inference.noise = 0.5
    config.inference.choice = "convergence"
    return config
