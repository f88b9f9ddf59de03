# SPDX-License-Identifier: Apache-2.0
"""Do experts learn? `tiny` with a shared expert and 8 routed ones; a token uses 2 of these, for the same FLOPs.

Expected: held-out loss 3.6411 nats per token, 1.35 bits per byte (`tiny`: 3.6427, 1.35). Cost: half as much
time again per step as `tiny` (benchmarks/moe.py).
Command: python train.py --config=configs/moe_small.py
"""

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.model.mlp_dim = 256
    config.model.num_experts = 8
    config.model.shared_experts = 1
    return config
