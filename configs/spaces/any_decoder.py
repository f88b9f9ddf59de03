# SPDX-License-Identifier: Apache-2.0
"""What may differ in a decoder of any size: the MLP's activation, the window, the norms, and the learning rate."""

from configs.space import Choice, Range

SPACE = {
    "model.activation": Choice(("silu", "gelu_tanh")),
    "model.sliding_window": Choice((0, 256, 1024)),
    "model.qk_norm": Choice((False, True)),
    "optimizer.learning_rate": Range(1e-4, 3e-3, log=True),
    "optimizer.weight_decay": Choice((0.01, 0.1)),
}
