# SPDX-License-Identifier: Apache-2.0
"""A 24-layer, 1024-wide decoder, the size of GPT-2 medium.

Expected: not yet run. Cost: 3.9 G tokens; rehearsed on v4-8 5.6 hours, 25.7 of 32 GiB a chip; on v4-32
1.4 hours, on v4-64 49 min.
Command: make train CONFIG=configs/large.py TOPOLOGY=v4-8
"""

from configs import medium


def get_config():
    """Return the recipe."""
    config = medium.get_config()
    config.model.num_layers = 24
    config.model.embed_dim = 1024
    config.model.num_heads = 8
    config.model.num_kv_heads = 4
    config.model.mlp_dim = 4096
    config.model.layer_loop = "auto"
    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 500
    config.train.steps = 30_000
    config.train.global_batch = 128
    return config
