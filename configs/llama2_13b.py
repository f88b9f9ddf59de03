# SPDX-License-Identifier: Apache-2.0
"""Llama 2 13B (arXiv:2307.09288, table 1): 40 layers, 5120 wide, 13,015,864,320 parameters.

Expected: not yet run. Cost: 66 G tokens; rehearsed on v4-64 12.0 days, 24.5 of 32 GiB a chip.
Command: make train CONFIG=configs/llama2_13b.py TOPOLOGY=v4-64
"""

from configs import llama2_7b


def get_config():
    config = llama2_7b.get_config()
    config.model.num_layers = 40
    config.model.embed_dim = 5120
    config.model.num_heads = 40
    config.model.num_kv_heads = 40
    config.model.mlp_dim = 13_824
    return config
