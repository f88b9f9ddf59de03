# SPDX-License-Identifier: Apache-2.0
"""The Tiny Recursive Model on Maze-Hard, 1,000 mazes of 30 x 30 in their 8 reflections: 6,824,450 parameters
(arXiv:2510.04871, table 4: 85.3 % exact).

Expected: not yet run. Cost: 65,104 steps.
Command: python train.py --config=configs/trm/maze.py --topology=v4-64 --config.data.path=FOLDER_WITH_CSV
"""

from configs.trm import sudoku


def get_config():
    config = sudoku.get_config()
    config.model.vocab_size = 6
    config.model.max_length = 900
    config.model.mixer = "attention"
    config.model.positions = "rope"
    config.model.low_cycles = 4
    config.data.source = "maze"
    config.data.puzzle_size = 30
    config.train.global_batch = 768
    config.train.sequence_length = 900
    return config
