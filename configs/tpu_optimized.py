# SPDX-License-Identifier: Apache-2.0
"""The recipe of configs/tpu_optimized_config.yaml: a 24-layer, 768-wide decoder with 4 key and value heads.

Expected: not yet run. Rehearsed on v4-32: 2.75 s a step, see rehearsal/recorded/tpu_optimized_v4-32.json.
Command: make train CONFIG=configs/tpu_optimized.py TOPOLOGY=v4-32
"""

from configs import base


def get_config():
    config = base.get_config()
    config.model.num_layers = 24
    config.model.embed_dim = 768
    config.model.num_heads = 12
    config.model.num_kv_heads = 4
    config.model.mlp_dim = 4096
    config.model.vocab_size = 32_000
    config.model.max_length = 2048
    config.model.dropout = 0.1
    config.model.tie_embeddings = True
    config.model.dtype = "bfloat16"
    config.model.remat = "full"
    config.data.readers = 4
    config.data.holdout_fraction = 0.1
    config.optimizer.learning_rate = 1e-4
    config.optimizer.warmup_steps = 500
    config.optimizer.weight_decay = 0.01
    config.train.steps = 20_000
    config.train.global_batch = 1024
    config.train.gradient_accumulation = 16
    config.train.sequence_length = 2048
    config.train.eval_every = 500
    config.train.save_every = 1000
    config.train.seed = 42
    config.batch.ramp = "steps"
    config.batch.first = 256
    config.tot.search = "beam"
    config.error_correction.use_mixture_density = True
    config.error_correction.memory_efficient = True
    return config
