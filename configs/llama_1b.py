# SPDX-License-Identifier: Apache-2.0
"""A Llama of a billion parameters: 16 layers, 2048 wide, 16 heads, MLP 8192; 1,204,881,408 parameters.

Expected: not yet run. Cost: 10.5 G tokens, half of 20 a parameter; rehearsed on v4-32 7.9 hours, 23.1 of 32 GiB a chip.
Command: make train CONFIG=configs/llama_1b.py TOPOLOGY=v4-32
"""

from configs import base


def get_config():
    config = base.get_config()
    config.model.num_layers = 16
    config.model.embed_dim = 2048
    config.model.num_heads = 16
    config.model.num_kv_heads = 16
    config.model.mlp_dim = 8192
    config.model.vocab_size = 32_000
    config.model.max_length = 2048
    config.model.remat = "up"
    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 1000
    config.train.steps = 20_000
    config.train.global_batch = 256
    config.train.sequence_length = 2048
    return config
