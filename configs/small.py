# SPDX-License-Identifier: Apache-2.0
"""A 6-layer, 512-wide decoder: 32 M parameters, 4 M of them the embedding's and 4 M the head's.

Expected: not yet run at this size. configs/tiny.py, the same block with 5.5 M parameters, reaches 1.35 bits a byte on
held-out Python source after 1.6 M tokens (`make bench ARGS=tiny_recipe`).
Cost: about 16 M tokens, an hour or two on two CPU cores. Rehearsed: on v4-8 11 s of steps, 1.2 of 32 GiB a chip; on
v4-32 and v4-64, which are too large for it, 5 s and at most 0.3 GiB. At the list price of a v4 that is less than $1.
Command: python train.py --config=configs/small.py --config.data.path='my_texts/*.txt'
"""

from configs import base


def get_config():
    config = base.get_config()
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.mlp_dim = 2048
    return config
