# SPDX-License-Identifier: Apache-2.0
"""The Universal Reasoning Model on ARC-AGI-1: one latent, four layers with a short convolution, backpropagation through
the last of two cycles of six updates (arXiv:2512.14693: 53.8 % within one attempt, and 16.0 % on ARC-AGI-2).

Votes of the answers are counted at several checkpoints, because the last one is not always the best.
Expected: not yet run.
Cost: about 1,038,000 steps. Rehearsed, at the list price of a v4: on v4-32 11 days (0.91 s a step), $13,500; on v4-64
5.1 days, $12,700. The four chips of the smallest slice need --config.train.gradient_accumulation=8: 41 days, $12,700.
Command: python train.py --config=configs/trm/arc_urm.py --topology=v4-64 --config.data.path=FOLDER_WITH_JSON
"""

from configs.trm import arc1


def get_config():
    config = arc1.get_config()
    config.model.num_layers = 4
    config.model.convolution = 2
    config.model.low_latents = 0
    config.model.low_cycles = 5
    config.model.high_cycles = 2
    config.train.epochs = 200_000.0
    config.evaluation.every_epochs = 20_000.0
    return config
