# SPDX-License-Identifier: Apache-2.0
"""The learning rate of AdamW, its warm-up and its weight decay."""

from configs.space import Range

SPACE = {
    "optimizer.learning_rate": Range(1e-4, 3e-2, log=True),
    "optimizer.warmup_steps": Range(0, 100, step=10),
    "optimizer.weight_decay": Range(0.01, 0.3, log=True),
}
