# SPDX-License-Identifier: Apache-2.0
"""Llama 3 8B (arXiv:2407.21783, table 3): grouped queries, rope base 500,000, 8,030,261,248 parameters.

Expected: not yet run. Cost: 131 G tokens; rehearsed on v4-64 15.2 days, 24.6 of 32 GiB a chip.
Command: make train CONFIG=configs/llama3_8b.py TOPOLOGY=v4-64
"""

from configs import llama2_7b


def get_config():
    config = llama2_7b.get_config()
    config.model.num_kv_heads = 8
    config.model.mlp_dim = 14_336
    config.model.vocab_size = 128_256
    config.model.max_length = 8192
    config.model.remat = "up"
    config.model.rope_theta = 500_000.0
    config.train.sequence_length = 8192
    config.train.loss_chunk_tokens = 0
    return config
