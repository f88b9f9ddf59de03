# SPDX-License-Identifier: Apache-2.0
"""The Tiny Recursive Model on ARC-AGI-1, its tasks in up to 1,001 versions each: 498,842,114 parameters, all but
7 million a table of 960,961 puzzle embeddings, split over fsdp (arXiv:2510.04871, table 5: 44.6 % within two attempts).

Expected: not yet run. Cost: about 519,000 steps.
Command: python train.py --config=configs/trm/arc1.py --topology=v4-64 --config.data.path=FOLDER_WITH_JSON
"""

from configs.trm import maze


def get_config():
    config = maze.get_config()
    config.model.vocab_size = 12
    config.model.num_puzzles = 960_961
    config.mesh.data = 1
    config.mesh.fsdp = -1
    config.data.source = "arc"
    config.data.puzzle_set = "arc1"
    config.optimizer.weight_decay = 0.1
    config.optimizer.table_learning_rate = 1e-2
    config.optimizer.table_weight_decay = 0.1
    config.train.epochs = 100_000.0
    config.evaluation.every_epochs = 10_000.0
    config.evaluation.votes_every = 50_000
    return config
