# SPDX-License-Identifier: Apache-2.0
"""The exponential moving average of the parameters, with which a run is evaluated and exported."""

import dataclasses

import jax
import jax.numpy as jnp

from training.optimizers import Weights, is_usual
from training.step_transform import StepTransform


def make(config, weights: Weights, schedule) -> "Average | None":
    return Average(weights, config.optimizer.ema_decay) if config.optimizer.ema_decay else None


@dataclasses.dataclass(frozen=True)
class Average(StepTransform):
    """average <- average + (1 - decay) * (parameters - average), after each update.

    With the two factors decay and 1 - decay, each rounded to float32, an average of 100,000 steps would shrink: their
    sum is not 1. The average of a table, a router bias or a constant is its present value.
    """

    weights: Weights
    decay: float
    name = "average"
    sees_all_changes = True

    def init(self, params: dict) -> dict:
        return jax.tree.map(jnp.copy, params)

    def update(self, context, change, memory):
        decays = self.weights.map(lambda axes: self.decay if is_usual(axes) else 0.0, change.params)
        return change, jax.tree.map(_mix, change.params, memory, decays), {}


def _mix(new: jax.Array, old: jax.Array, decay: float) -> jax.Array:
    return old + (1 - decay) * (new - old) if decay else new
