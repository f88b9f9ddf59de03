# SPDX-License-Identifier: Apache-2.0
"""Decides, inside the compiled step, whether an update is taken: not where it is not a number, nor where it spikes."""

import jax
import jax.numpy as jnp

DECAY = 0.97  # of the running mean and variance, as in ZClip
FIRST_STEPS = 50  # good ones, of which nothing is remembered: a loss that falls steeply would look like deviation
LEARNING_STEPS = 100  # good ones, before anything is called a spike


def init() -> dict:
    """Return what the guard remembers.

    `skipped` and `in_a_row`, int32, count updates that were not taken; `seen` the good ones; `mean` and `variance`,
    float32 [2], are those of the loss and of the logarithm of the gradient's norm over good steps.
    """
    numbers = dict.fromkeys(("skipped", "in_a_row", "seen"), jnp.int32(0))
    return numbers | {"mean": jnp.zeros(2), "variance": jnp.zeros(2)}


def judge(memory: dict, loss: jax.Array, gradient_norm: jax.Array, deviations: float) -> tuple[jax.Array, dict]:
    """Return whether to take an update, bool, and what the guard remembers after it.

    An update is bad where loss or gradient are not finite, or, with `deviations` above 0, where one of them is that
    many standard deviations above its running mean, as in ZClip (arXiv:2504.02507, section 3).
    """
    values = jnp.stack([loss, jnp.log(gradient_norm + 1e-30)]).astype(jnp.float32)
    good = jnp.isfinite(loss) & jnp.isfinite(gradient_norm)
    if deviations:
        limits = memory["mean"] + deviations * jnp.sqrt(memory["variance"])
        good &= (memory["seen"] < LEARNING_STEPS) | jnp.all(values <= limits)
    counted = jnp.maximum(memory["seen"] - FIRST_STEPS, 0)
    weight = jnp.maximum(1 - DECAY, 1 / (counted + 1.0))  # the plain mean at first
    away = jnp.where(good, values - memory["mean"], 0.0)
    return good, {
        "skipped": memory["skipped"] + ~good,
        "in_a_row": jnp.where(good, 0, memory["in_a_row"] + 1),
        "seen": memory["seen"] + good,
        "mean": memory["mean"] + weight * away,
        "variance": jnp.where(good, (1 - weight) * (memory["variance"] + weight * away**2), memory["variance"]),
    }
