# SPDX-License-Identifier: Apache-2.0
"""`large` with 8 experts of half its MLP's width; each token uses 2 of them, so the FLOPs per token are the same.

`NUM_EXPERTS=8 MODEL_SIZE=large pod.py launch` trains it. Expected: not yet run. Cost: 3.9 G tokens; rehearsed on v4-64
1.8 hours, 4.6 of 32 GiB a chip.
Command: make train CONFIG=configs/large_moe.py TOPOLOGY=v4-64
"""

from configs import large


def get_config():
    """Return the recipe."""
    config = large.get_config()
    config.model.mlp_dim = 2048
    config.model.num_experts = 8
    return config
