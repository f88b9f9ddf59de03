# SPDX-License-Identifier: Apache-2.0
"""Meta-learning: can a transformer learn a linear function from examples that it only reads?

In-context regression (arXiv:2208.01066) of five numbers: ten examples are given, and the others are predicted.
Expected: the error of the queries approaches that of least squares, 0 for noiseless examples; the variance is 5.
Cost: minutes on two CPU cores. Command: python train.py --config=configs/meta_in_context.py --workdir=runs/in_context
"""

from configs import meta_sinusoid


def get_config():
    config = meta_sinusoid.get_config()
    config.model.name = "vector_decoder"
    config.model.input_dim = 5
    config.model.vocab_size = 1
    config.model.num_layers = 3
    config.model.embed_dim = 64
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.mlp_dim = 128
    config.data.source = "linear_maps"
    config.meta.method = "in_context"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_steps = 100
    config.optimizer.clip_norm = 1.0
    config.train.steps = 3_000
    config.train.sequence_length = 12
    config.train.global_batch = 64
    config.train.eval_every = 1_000
    return config
