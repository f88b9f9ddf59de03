# SPDX-License-Identifier: Apache-2.0
"""Does a head that predicts rewards guide a search as well as verdicts do? For the model of configs/countdown.py.

Each step draws 16 answers to each of 8 problems, and trains the head to predict which are right. See docs/reasoning.md
and benchmarks/countdown.py.
Command: python train.py --config=configs/countdown_value_head.py
"""

from configs import countdown_grpo


def get_config():
    config = countdown_grpo.get_config()
    config.train.objective = "value_head"
    config.train.init_from = "runs/countdown"
    config.train.steps = 60
    config.optimizer.learning_rate = 1e-2
    config.tot.search = "bfs"
    config.tot.value = "value_head"
    return config
