# SPDX-License-Identifier: Apache-2.0
"""A 12-layer, 768-wide decoder, near the size of GPT-2 small: 153 M parameters, 25 M of them the embedding's.

Expected: not yet run at this size. configs/tiny.py, the same block with 5.5 M parameters, reaches 1.35 bits a byte on
held-out Python source after 1.6 M tokens (`make bench ARGS=tiny_recipe`).
Cost: 2.6 G tokens. Rehearsed: on v4-8 65 min, 17.9 of 32 GiB a chip, $14 at the list price of a v4; on v4-32 16 min,
5.4 GiB, $14; on v4-64 9 min, 3.3 GiB, $15.
Command: make train CONFIG=configs/medium.py TOPOLOGY=v4-8 ARGS="--config.data.path='my_texts/*.txt'"
"""

from configs import base


def get_config():
    config = base.get_config()
    config.model.num_layers = 12
    config.model.embed_dim = 768
    config.model.num_heads = 6
    config.model.num_kv_heads = 2
    config.model.mlp_dim = 3072
    config.model.layer_loop = "unroll"  # 6 % faster than a scan, see docs/decisions/rehearsal.md
    config.model.vocab_size = 32_000
    config.model.max_length = 1024
    config.model.remat = "dots"
    config.optimizer.learning_rate = 6e-4
    config.optimizer.warmup_steps = 200
    config.train.steps = 10_000
    config.train.global_batch = 256
    config.train.sequence_length = 1024
    return config
