# SPDX-License-Identifier: Apache-2.0
"""`medium` with 8 experts of half its MLP's width, of which a token goes through 2: as many FLOPs a token.

`NUM_EXPERTS=8 pod.py launch_optimized` trains it. Expected: not yet run. Cost: rehearse.py tells it.
Command: make train CONFIG=configs/medium_moe.py
"""

from configs import medium


def get_config():
    """Return the recipe."""
    config = medium.get_config()
    config.model.mlp_dim = 1024
    config.model.num_experts = 8
    return config
