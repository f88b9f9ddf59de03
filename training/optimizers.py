# SPDX-License-Identifier: Apache-2.0
"""Optimizers by name: `optimizer.name = "adamw"` is the function `adamw` here, made of optax's parts.

To add one: a function (config, schedule) -> optax.GradientTransformation, and a test.
"""

import jax
import optax

NOT_DECAYED = ("scale", "bias", "embedding")  # names of norms, biases and embeddings


def adamw(config, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Adam with decoupled weight decay (arXiv:1711.05101, algorithm 2)."""
    return optax.adamw(
        schedule, b1=config.beta1, b2=config.beta2, eps=config.epsilon,
        weight_decay=config.weight_decay, mask=is_decayed,
    )  # fmt: skip


def is_decayed(params: dict) -> dict:
    """Return for each parameter whether weight decay applies to it."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in NOT_DECAYED, params)


def clipped(optimizer: optax.GradientTransformation, clip_norm: float) -> optax.GradientTransformation:
    """Scale gradients of a larger global norm down to `clip_norm` before the optimizer sees them; 0: as it is."""
    return optax.chain(optax.clip_by_global_norm(clip_norm), optimizer) if clip_norm else optimizer
