# SPDX-License-Identifier: Apache-2.0
"""How well does a 0.9 M-parameter model predict bytes? nanoGPT's CPU recipe: 4 layers, 4 heads, 128 wide,
context 64, batch 12, 2,000 steps, no dropout. Its published held-out loss is 1.88 nats per character on tiny
Shakespeare, which is not included: name your own text.

Expected: benchmarks/RESULTS.md. Cost: about two minutes on two CPU cores.
Command: python train.py --config=configs/char.py --config.data.path=my_text.txt
"""

from configs import base


def get_config():
    config = base.get_config()
    config.model.num_layers = 4
    config.model.embed_dim = 128
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.mlp_dim = 384
    config.model.vocab_size = 256
    config.model.max_length = 64
    config.data.tokenizer = "byte"
    config.data.holdout_fraction = 0.1
    config.optimizer.learning_rate = 3e-3
    config.train.steps = 2000
    config.train.global_batch = 12
    config.train.sequence_length = 64
    config.train.log_every = 50
    config.train.eval_every = 500
    config.train.save_every = 1000
    return config
