# SPDX-License-Identifier: Apache-2.0
"""Mixtral 8x7B (arXiv:2401.04088, table 1): 32 layers, 4096 wide, 8 experts, 2 of them per token;
46,702,792,960 parameters, 12.9 G of them per token. 256 of them are the router's balancing biases, which Mixtral lacks.

Expected: not yet run. Cost: 26 G tokens; rehearsed on v5p-128 2.0 days, 92.6 of 95 GiB a chip. It fits on 32 v4 chips
with train.sequence_length=2048, train.global_batch=32 and model.remat=full, with 30.6 of 32 GiB a chip.
Command: make train CONFIG=configs/mixtral_8x7b.py TOPOLOGY=v5p-128
"""

from configs import base


def get_config():
    config = base.get_config()
    config.model.num_layers = 32
    config.model.embed_dim = 4096
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.mlp_dim = 14_336
    config.model.num_experts = 8
    config.model.vocab_size = 32_000
    config.model.max_length = 4096
    config.model.rope_theta = 1e6
    config.model.remat = "hidden"
    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 500
    config.train.steps = 25_000
    config.train.global_batch = 256
    config.train.sequence_length = 4096
    return config
