# SPDX-License-Identifier: Apache-2.0
"""`large` with 8 experts of half its MLP's width; each token uses 2 of them, so the FLOPs per token are the same.

A step has four times the sequences of `large`, since summing the gradients of all experts takes as long for few tokens.
`NUM_EXPERTS=8 MODEL_SIZE=large pod.py launch` trains it. Expected: not yet run. Cost: 3.9 G tokens; rehearsed on v4-64
62 min, 12.1 of 32 GiB a chip.
Command: make train CONFIG=configs/large_moe.py TOPOLOGY=v4-64
"""

from configs import large


def get_config():
    config = large.get_config()
    config.model.mlp_dim = 2048
    config.model.num_experts = 8
    config.optimizer.warmup_steps = 125
    config.train.steps = 7500
    config.train.global_batch = 512
    return config
