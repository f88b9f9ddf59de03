# SPDX-License-Identifier: Apache-2.0
"""The Tiny Recursive Model on ARC-AGI-2, as `arc1.py`, with a table of 1,281,281 puzzle embeddings
(arXiv:2510.04871, table 5: 7.8 % within two attempts).

Expected: not yet run. Cost: about 725,000 steps.
Command: python train.py --config=configs/trm/arc2.py --topology=v4-64 --config.data.path=FOLDER_WITH_JSON
"""

from configs.trm import arc1


def get_config():
    config = arc1.get_config()
    config.model.num_puzzles = 1_281_281
    config.data.puzzle_set = "arc2"
    return config
