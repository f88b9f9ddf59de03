# SPDX-License-Identifier: Apache-2.0
"""The Tiny Recursive Model on Sudoku-Extreme in a fraction of the updates: four latents in parallel with the gradient
through the best alone, Muon, smoothed labels ("Speed is Confidence", arXiv:2601.19085: 96.9 % exact in one pass).

The published learning rate, 0.02, is of another scale of Muon; here 2.5e-3 makes updates as large. Two things of the
published code are left out: a SwiGLU of its own, and initial latents that are singular vectors.
Expected: not yet run.
Cost: 36,000 steps. Rehearsed, at the list price of a v4: on v4-8 70 min (116 ms a step), $15; on v4-32 16 min, $14; on
v4-64 9 min, $16. All 422,786 test boards with breadth and depth 16: about 11 chip-hours; with 128 and 64: 330 to 365.
Command: python train.py --config=configs/trm/sudoku_fast.py --topology=v4-64 --config.data.path=FOLDER_WITH_CSV
"""

from configs.trm import sudoku


def get_config():
    config = sudoku.get_config()
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 2.5e-3
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_steps = 0
    config.optimizer.final_fraction = 0.0
    config.optimizer.weight_decay = 0.0
    config.optimizer.clip_norm = 1.0
    config.optimizer.ema_decay = 0.9
    config.supervision.loss = "softmax"
    config.supervision.label_smoothing = 0.2
    config.supervision.parallel = 4
    config.supervision.random_start = 1.0
    config.train.steps = 36_000
    config.train.epochs = 0.0
    config.train.global_batch = 192
    config.train.eval_every = 2000
    config.evaluation.every_epochs = 0.0
    return config
