# SPDX-License-Identifier: Apache-2.0
"""Does it learn? The default: 4 layers, 256 wide, 5.5 M parameters, on the Python standard library's source.

Expected: see docs/results.md. Cost: five to nine minutes on two CPU cores.
Command: make train
"""

from configs import base


def get_config():
    config = base.get_config()
    config.model.num_layers = 4
    config.model.embed_dim = 256
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.mlp_dim = 768
    config.model.vocab_size = 4096
    config.model.max_length = 512
    config.optimizer.learning_rate = 4e-3
    config.optimizer.warmup_steps = 30
    config.train.steps = 200
    config.train.global_batch = 32  # a sequence for each chip of a v4-64
    config.train.sequence_length = 256
    config.train.eval_every = 50
    config.train.save_every = 100
    return config
