# SPDX-License-Identifier: Apache-2.0
"""`small` with 8 experts of half its MLP's width; each token uses 2 of them, so the FLOPs per token are the same.

`NUM_EXPERTS=8 MODEL_SIZE=small pod.py launch` trains it. Expected: not yet run. Cost: 16 M tokens; rehearsed on v4-8
18 s of steps, 1.3 of 32 GiB a chip.
Command: make train CONFIG=configs/small_moe.py TOPOLOGY=v4-8
"""

from configs import small


def get_config():
    config = small.get_config()
    config.model.mlp_dim = 1024
    config.model.num_experts = 8
    return config
