# SPDX-License-Identifier: Apache-2.0
"""The base configuration without changes: 6 layers, 512 wide, 28 M parameters.

Expected: not yet run to the end. Cost: about 16 M tokens, an hour or two on two CPU cores; rehearsed, 12 s of steps on
v4-8, 5 s on v4-32 and on v4-64, which are too large for it.
Command: python train.py --config=configs/small.py --config.data.path='my_texts/*.txt'
"""

from configs import base


def get_config():
    """Return the recipe."""
    config = base.get_config()
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.mlp_dim = 2048
    return config
