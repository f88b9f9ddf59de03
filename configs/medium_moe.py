# SPDX-License-Identifier: Apache-2.0
"""`medium` with 8 experts of half its MLP's width; each token uses 2 of them, so the FLOPs per token are the same.

`NUM_EXPERTS=8 pod.py launch` trains it. Expected: not yet run. Cost: 2.6 G tokens; rehearsed on v4-8 1.9 hours, 19.1
of 32 GiB a chip; on v4-32 29 min, 6.0 GiB.
Command: make train CONFIG=configs/medium_moe.py TOPOLOGY=v4-8
"""

from configs import medium


def get_config():
    config = medium.get_config()
    config.model.mlp_dim = 1536
    config.model.layer_loop = "auto"
    config.model.num_experts = 8
    return config
