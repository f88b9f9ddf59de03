# SPDX-License-Identifier: Apache-2.0
"""Decide inside the compiled step whether to skip an update, because it is not finite or a spike."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from training.step_transform import StepTransform

DECAY = 0.97  # of the running mean and variance, as in ZClip
FIRST_STEPS = 50  # good steps that do not enter the statistics: a steep fall of the loss would look like deviation
LEARNING_STEPS = 100  # such steps before any value can be a spike


def make(config, weights, schedule) -> "Guard":
    return Guard(schedule, config.train.spike_deviations)


@dataclasses.dataclass(frozen=True)
class Guard(StepTransform):
    """Reject an update whose loss or gradient is not finite, or is a spike.

    Its scalars are `skipped` (1 if the update is rejected), `skipped_in_a_row`, and `learning_rate`. The schedule
    advances with accepted updates only.

    Attributes:
      spike_deviations: see `judge`.
    """

    schedule: optax.Schedule
    spike_deviations: float = 0.0
    name = "guard"
    remembers_rejected = True

    def init(self, params: dict) -> dict:
        """Return the initial memory.

        `skipped` and `in_a_row`, int32, count skipped updates, and `seen` the good ones with a gradient. `mean` and
        `variance`, float32 [2], are those of the loss and of the logarithm of the gradient norm over the latter.
        """
        numbers = dict.fromkeys(("skipped", "in_a_row", "seen"), jnp.int32(0))
        return numbers | {"mean": jnp.zeros(2), "variance": jnp.zeros(2)}

    def update(self, context, change, memory):
        before, norm = memory, context.gradient_norm
        good, memory = judge(before, context.scalars["loss"], norm, self.spike_deviations)
        return change._replace(accepted=change.accepted & good), memory, {
            "learning_rate": jnp.asarray(self.schedule(context.state.step - before["skipped"]), jnp.float32),
            "skipped": (~good).astype(jnp.float32),
            "skipped_in_a_row": memory["in_a_row"].astype(jnp.float32),
        }  # fmt: skip


def judge(memory: dict, loss: jax.Array, gradient_norm: jax.Array, deviations: float) -> tuple[jax.Array, dict]:
    """Return whether to accept an update, bool, and the new memory.

    An update is bad if the loss or gradient is not finite. With `deviations` above 0 it is also bad if one of them is
    that many standard deviations above its running mean, as in ZClip (arXiv:2504.02507, section 3). A gradient of 0,
    such as that of answers with equal rewards, is good and does not enter the statistics.
    """
    has_gradient = gradient_norm != 0
    values = jnp.stack([loss, jnp.log(jnp.where(has_gradient, gradient_norm, 1.0))]).astype(jnp.float32)
    good = jnp.isfinite(loss) & jnp.isfinite(gradient_norm)
    if deviations:
        limits = memory["mean"] + deviations * jnp.sqrt(memory["variance"])
        good &= (memory["seen"] < LEARNING_STEPS) | jnp.all(values <= limits) | ~has_gradient
    counted = jnp.maximum(memory["seen"] - FIRST_STEPS, 0)
    weight = jnp.maximum(1 - DECAY, 1 / (counted + 1.0))  # the plain mean at first
    counts = good & has_gradient
    away = jnp.where(counts, values - memory["mean"], 0.0)
    return good, {
        "skipped": memory["skipped"] + ~good,
        "in_a_row": jnp.where(good, 0, memory["in_a_row"] + 1),
        "seen": memory["seen"] + counts,
        "mean": memory["mean"] + weight * away,
        "variance": jnp.where(counts, (1 - weight) * (memory["variance"] + weight * away**2), memory["variance"]),
    }
