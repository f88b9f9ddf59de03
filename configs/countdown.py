# SPDX-License-Identifier: Apache-2.0
"""Does search solve more than the model alone? Arithmetic countdown, see input_pipeline/tasks/countdown.py.

The model proposes the lines of an answer, and says whether numbers reach a target. See docs/reasoning.md.
Cost: about 13 minutes on two CPU cores. Command: python train.py --config=configs/countdown.py
"""

from configs import base


def get_config():
    config = base.get_config()
    config.model.num_layers = 4
    config.model.embed_dim = 128
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.mlp_dim = 384
    config.model.vocab_size = 228
    config.model.max_length = 128
    config.model.dtype = "float32"  # on a CPU faster than bfloat16 at this size
    config.data.source = "countdown"
    config.data.tokenizer = "numbers"
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 1e-2
    config.train.steps = 2000
    config.train.global_batch = 24
    config.train.sequence_length = 128
    config.train.log_every = 100
    config.train.eval_every = 1000
    config.train.save_every = 500
    config.evaluation.sample_tokens = 0
    return config
