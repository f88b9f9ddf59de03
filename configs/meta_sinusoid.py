# SPDX-License-Identifier: Apache-2.0
"""Meta-learning: can a network learn a new sinusoid from ten points in five gradient steps?

MAML on 10-shot sinusoids (arXiv:1703.03400, section 5.1): two hidden layers of 40 units, one inner step in training.
Expected: after 5,000 steps a squared error of 0.18 on held-out sinusoids, a tenth of that of a network trained without
an inner loop (`--config.meta.inner_steps=0`), by `make bench ARGS=meta_learning`.
Cost: a minute or two on two CPU cores.
Command: python train.py --config=configs/meta_sinusoid.py --workdir=runs/sinusoid
"""

from configs import base


def get_config():
    config = base.get_config()
    config.model.name = "mlp_regressor"
    config.model.num_layers = 2
    config.model.mlp_dim = 40
    config.model.max_length = 20
    config.model.dtype = "float32"
    config.model.attention = "reference"
    config.data.source = "sinusoids"
    config.data.tokenizer = ""
    config.meta.method = "maml"
    config.meta.inner_rate = 0.01
    config.optimizer.learning_rate = 3e-3
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 0
    config.optimizer.weight_decay = 0.0
    config.optimizer.beta2 = 0.999
    config.optimizer.clip_norm = 0.0
    config.train.objective = "meta_learning"
    config.train.steps = 10_000
    config.train.sequence_length = 20
    config.train.global_batch = 24
    config.train.eval_every = 2_500
    config.train.save_every = 5_000
    config.train.log_every = 500
    return config
