# SPDX-License-Identifier: Apache-2.0
"""Can a small module find and repair the wrong tokens of a text? On the frozen model of configs/tiny.py.

A tenth of the tokens is replaced. See docs/reasoning.md; benchmarks/error_correction.py measures it.
Cost: 4,000 steps, for which train.py estimates 30 minutes on two idle CPU cores.
Command: python train.py --config=configs/error_correction.py --config.train.init_from=runs/tiny
"""

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.train.objective = "error_correction"
    config.train.init_from = "runs/tiny"
    config.error_correction.use_error_correction = True
    config.error_correction.use_mixture_density = True
    config.error_correction.num_layers = 4
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 1e-2
    config.train.global_batch = 8  # small batches take fewer tokens to the same loss
    config.train.steps = 4000
    config.train.eval_every = 500
    config.train.save_every = 500
    return config
