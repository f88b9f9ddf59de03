# SPDX-License-Identifier: Apache-2.0
"""Does reinforcement learning from verifiable rewards (GRPO) improve the model of configs/countdown.py?

Each step draws 16 answers to each of 8 problems, and rewards the right ones. See docs/reasoning.md.
Expected: 0.44 of 500 held-out problems solved greedily, 0.29 before (benchmarks/grpo.py). Cost: 8 minutes on two CPU
cores that also did other work.
Command: python train.py --config=configs/countdown_grpo.py --config.train.init_from=runs/countdown
"""

from configs import countdown


def get_config():
    config = countdown.get_config()
    config.train.objective = "grpo"
    config.data.source = "countdown_rollouts"
    config.train.sequence_length = 80
    config.train.global_batch = 128
    config.train.steps = 200
    config.optimizer.name = "adamw"
    config.optimizer.learning_rate = 3e-4
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 10
    config.optimizer.weight_decay = 0.0
    config.train.log_every = 5
    config.train.eval_every = 50
    config.train.save_every = 50
    config.tot.use_tot = True
    config.tot.search = "greedy"
    config.tot.problems = 200
    return config
