# SPDX-License-Identifier: Apache-2.0
"""A 12-layer, 768-wide decoder, the size of GPT-2 small: 134 M parameters, 25 M of them the embedding's.

Expected: not yet run. Cost: 2.6 G tokens; rehearsed on v4-8 1.4 hours, 19.8 of 32 GiB a chip; on v4-32
21 min, on v4-64 11 min.
Command: make train CONFIG=configs/medium.py TOPOLOGY=v4-8
"""

from configs import base


def get_config():
    """Return the recipe."""
    config = base.get_config()
    config.model.num_layers = 12
    config.model.embed_dim = 768
    config.model.num_heads = 6
    config.model.num_kv_heads = 2
    config.model.mlp_dim = 3072
    config.model.layer_loop = "unroll"  # 6 % faster than a scan of 12 layers, and compiled in 4 times its time
    config.model.vocab_size = 32_000
    config.model.max_length = 1024
    config.model.remat = "dots"
    config.optimizer.learning_rate = 6e-4
    config.optimizer.warmup_steps = 200
    config.train.steps = 10_000
    config.train.global_batch = 256
    config.train.sequence_length = 1024
    return config
