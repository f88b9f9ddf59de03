# SPDX-License-Identifier: Apache-2.0
"""Llama 2 7B (arXiv:2307.09288, tables 1 and 2): 32 layers, 4096 wide, 6,738,415,616 parameters.

Expected: not yet run. Cost: 66 G tokens; rehearsed on v4-32 11.7 days, 27.7 of 32 GiB a chip. The paper's batch of 4 M
tokens takes train.global_batch=1024 and train.gradient_accumulation=32 there.
Command: make train CONFIG=configs/llama2_7b.py TOPOLOGY=v4-32
"""

from configs import base


def get_config():
    config = base.get_config()
    config.model.num_layers = 32
    config.model.embed_dim = 4096
    config.model.num_heads = 32
    config.model.num_kv_heads = 32
    config.model.mlp_dim = 11_008
    config.model.vocab_size = 32_000
    config.model.max_length = 4096
    config.model.remat = "mlp"
    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 2000
    config.train.steps = 500_000
    config.train.global_batch = 32
    config.train.sequence_length = 4096
    config.train.loss_chunk_tokens = 4096  # half of a chip's on v4-32: two GiB for 0.3 % of a step
    config.train.save_every = 1000
    return config
