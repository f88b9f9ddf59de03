# SPDX-License-Identifier: Apache-2.0
"""A plain network of three hidden layers that classifies images of handwritten digits, 8 by 8 pixels.

The images are those of scikit-learn (1,797, in its wheel). Any file with one image a line works: pixels, then the
label, integers separated by commas. To write it:

    python -c "import numpy, sklearn.datasets as d; x, y = d.load_digits(return_X_y=True); \
numpy.savetxt('digits.csv', numpy.column_stack([x, y]), '%d', ',')"

Expected: 95 % of the held-out images or more. Cost: about ten seconds on two CPU cores.
Command: python train.py --config=configs/digits.py --config.data.path=digits.csv
"""

from configs import base


def get_config():
    config = base.get_config()
    config.model.name = "mlp_classifier"
    config.model.num_layers = 3
    config.model.mlp_dim = 64
    config.model.vocab_size = 10
    config.model.max_length = 64
    config.model.levels = 17
    config.data.source = "labeled"
    config.data.tokenizer = ""
    config.data.holdout_fraction = 0.2
    config.optimizer.learning_rate = 3e-3
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 0
    config.optimizer.weight_decay = 0.0
    config.optimizer.beta2 = 0.999
    config.optimizer.clip_norm = 0.0
    config.train.objective = "classification"
    config.train.steps = 1000
    config.train.global_batch = 32
    config.train.sequence_length = 64
    config.train.log_every = 50
    config.train.eval_every = 250
    config.train.save_every = 500
    return config
