# SPDX-License-Identifier: Apache-2.0
"""The Tiny Recursive Model on Sudoku-Extreme, 1,000 puzzles in 1,001 versions each: 5,030,402 parameters, 1,024 of them
constants, that mix cells by an MLP (arXiv:2510.04871, table 4: 87.4 % exact), at the plan's batch of 6,144.

Expected: not yet run; the published run has a batch of 768 (--config.train.global_batch=768), 65,104 steps.
Cost: 8,138 steps.
Command: python train.py --config=configs/trm/sudoku.py --topology=v4-64 --config.data.path=FOLDER_WITH_CSV
"""

from configs import base


def get_config():
    config = base.get_config()
    config.model.name = "trm"
    config.model.num_layers = 2
    config.model.mlp_dim = 1536
    config.model.vocab_size = 11
    config.model.max_length = 81
    config.model.mixer = "mlp"
    config.model.positions = "none"
    config.mesh.data = -1
    config.mesh.fsdp = 1
    config.data.source = "sudoku"
    config.optimizer.name = "adam_atan2"
    config.optimizer.learning_rate = 1e-4
    config.optimizer.schedule = "cosine_from_one"
    config.optimizer.warmup_steps = 2000
    config.optimizer.final_fraction = 1.0
    config.optimizer.weight_decay = 1.0
    config.optimizer.decayed = "all"
    config.optimizer.table_learning_rate = 1e-4
    config.optimizer.table_weight_decay = 1.0
    config.optimizer.clip_norm = 0.0
    config.optimizer.ema_decay = 0.999
    config.train.objective = "recursive"
    config.train.steps = 0
    config.train.epochs = 50_000.0
    config.train.global_batch = 6144
    config.train.sequence_length = 81
    config.train.eval_every = 0
    config.evaluation.every_epochs = 5000.0
    config.evaluation.sample_tokens = 0
    return config
