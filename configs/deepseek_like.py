# SPDX-License-Identifier: Apache-2.0
"""A decoder of the sizes of DeepSeek-V2-Lite (arXiv:2405.04434, appendix B) with the router of DeepSeek-V3
(arXiv:2412.19437): 27 layers, 2048 wide, 64 experts, 6 of them per token, and 2 shared experts.

Attention is multi-head, since DeepSeek's latent attention is not implemented. The first layer has experts too.
Expected: not yet run. Cost: 26 G tokens; rehearsed on v5p-128 14 hours, 37.0 of 95 GiB a chip. It fits on 32 v4 chips
with train.global_batch=64 and model.remat=full, with 14.9 of 32 GiB a chip.
Command: make train CONFIG=configs/deepseek_like.py TOPOLOGY=v5p-128
"""

from configs import base


def get_config():
    config = base.get_config()
    config.model.num_layers = 27
    config.model.embed_dim = 2048
    config.model.num_heads = 16
    config.model.num_kv_heads = 16
    config.model.mlp_dim = 1408
    config.model.num_experts = 64
    config.model.experts_per_token = 6
    config.model.shared_experts = 2
    config.model.router = "sigmoid"
    config.model.gate_scale = 2.5
    config.model.vocab_size = 102_400
    config.model.max_length = 4096
    config.model.remat = "dots"
    config.optimizer.learning_rate = 4.2e-4
    config.optimizer.warmup_steps = 500
    config.train.steps = 25_000
    config.train.global_batch = 256
    config.train.sequence_length = 4096
    config.train.save_every = 250
    return config
