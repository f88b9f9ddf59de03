# SPDX-License-Identifier: Apache-2.0
"""An equilibrium reasoner of width 128 on mazes of 30 x 30 with one path of at least 100 steps, made on the spot
(Maze-Unique, arXiv:2605.21488: 100 % exact with about as many weights, in the supplement of its code). 264,194
parameters.

The published paths have 100 to 140 steps. docs/puzzles.md says how to have smaller mazes.
Expected: not yet run.
Cost: 100,000 steps. Rehearsed, at the list price of a v4: on v4-8 19 hours (680 ms a step), $243; on v4-32 4.5 hours,
$232; on v4-64 2.3 hours, $233.
Command: python train.py --config=configs/trm/maze_unique.py --topology=v4-64
"""

from configs.trm import maze


def get_config():
    config = maze.get_config()
    config.model.num_layers = 1
    config.model.embed_dim = 128
    config.model.mlp_dim = 512
    config.model.puzzle_dim = 0
    config.model.update_rate = 0.95
    config.supervision.random_start = 1.0
    config.supervision.path_noise = 0.1
    config.data.puzzle_augmentations = 0
    config.data.puzzle_min_difficulty = 100
    config.optimizer.learning_rate = 3e-4
    config.optimizer.weight_decay = 0.5
    config.train.steps = 100_000
    config.train.epochs = 0.0
    config.train.eval_every = 5000
    config.evaluation.every_epochs = 0.0
    return config
