# SPDX-License-Identifier: Apache-2.0
"""A 24-layer, 1024-wide decoder, near the size of GPT-2 medium: 443 M parameters, 33 M of them the embedding's.

Expected: not yet run at this size. configs/tiny.py, the same block with 5.5 M parameters, reaches 1.35 bits a byte on
held-out Python source after 1.6 M tokens (`make bench ARGS=tiny_recipe`).
Cost: 3.9 G tokens. Rehearsed: on v4-8 4.8 hours, 22.2 of 32 GiB a chip, $61 at the list price of a v4; on v4-32 74 min,
7.1 GiB, $64; on v4-64 43 min, 3.6 GiB, $74.
Command: make train CONFIG=configs/large.py TOPOLOGY=v4-8 ARGS="--config.data.path='my_texts/*.txt'"
"""

from configs import medium


def get_config():
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
