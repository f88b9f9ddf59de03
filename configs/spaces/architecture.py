# SPDX-License-Identifier: Apache-2.0
"""The shape of a small decoder: depth, width with heads, kind and width of MLP, and window, with its learning rate."""

from configs.space import Choice, Range

SPACE = {
    "model.num_layers": Range(1, 6, step=1),
    "width": Choice(
        {
            "64x2": {"model.embed_dim": 64, "model.num_heads": 2, "model.num_kv_heads": 1},
            "128x4": {"model.embed_dim": 128, "model.num_heads": 4, "model.num_kv_heads": 2},
            "192x6": {"model.embed_dim": 192, "model.num_heads": 6, "model.num_kv_heads": 2},
        }
    ),
    "model.mlp_dim": Choice((128, 256, 384, 512)),
    "mlp": Choice(
        {
            "silu": {"model.activation": "silu"},
            "gelu": {"model.activation": "gelu_tanh"},
            "one expert of 4": {"model.num_experts": 4, "model.experts_per_token": 1},
            "two experts of 4": {"model.num_experts": 4, "model.experts_per_token": 2},
        }
    ),
    "model.sliding_window": Choice((0, 32, 128)),
    "optimizer.learning_rate": Range(3e-4, 1e-2, log=True),
}
