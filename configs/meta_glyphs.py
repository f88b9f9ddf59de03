# SPDX-License-Identifier: Apache-2.0
"""Meta-learning: can a network tell five unseen drawings apart after one example of each?

Prototypical networks (arXiv:1703.05175) on generated glyphs, 5-way 1-shot; held-out tasks have classes that training
never shows. Expected: about 0.8 of the queries right; the nearest raw image gets 0.42. Cost: a minute or two on two
CPU cores. Command: python train.py --config=configs/meta_glyphs.py --workdir=runs/glyphs
"""

from configs import meta_sinusoid


def get_config():
    config = meta_sinusoid.get_config()
    config.model.input_dim = 196
    config.model.output_dim = 64
    config.model.mlp_dim = 256
    config.data.source = "glyphs"
    config.meta.method = "prototypical"
    config.meta.loss = "cross_entropy"
    config.meta.support = 5
    config.train.steps = 1_000
    config.optimizer.learning_rate = 1e-3
    config.train.global_batch = 32
    config.train.eval_every = 500
    config.train.save_every = 1_000
    config.train.log_every = 50
    return config
