# SPDX-License-Identifier: Apache-2.0
"""Report in each step how able to learn a network still is, with or without a method of plasticity."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from configs.errors import ConfigError
from training.optimizers import Weights
from training.plasticity import replacement
from training.plasticity.methods import activities, measures
from training.plasticity.replacement import from_memory, to_memory
from training.step_transform import StepTransform


def make(config, weights: Weights, schedule) -> "PlasticityMeasures | None":
    """Return it if a configuration measures plasticity; ConfigError if the model names no hidden units."""
    if not config.plasticity.measure:
        return None
    if not weights.units:
        raise ConfigError(
            f"plasticity.measure={config.plasticity.measure} measures hidden units, and model.name={config.model.name} "
            "names none; use 0"
        )
    return PlasticityMeasures(weights, config.plasticity.decay, config.plasticity.dormant_below)


@dataclasses.dataclass(frozen=True)
class PlasticityMeasures(StepTransform):
    """Report `dormant_share`, the share of units that are dormant, and `weight_norm`, that of all parameters.

    The effective rank of the units needs a singular value decomposition, so it is a figure of an evaluator,
    core/evaluations/effective_rank.py.

    Memory: `activity`, a running mean of the mean absolute activation of each unit, float32.
    """

    weights: Weights
    decay: float
    dormant_below: float
    name = "plasticity_measures"

    @property
    def measures(self):
        return measures(self.weights.units, {"size": jnp.abs})

    def init(self, params):
        return {"activity": replacement.filled(self.weights.units, params, 0.0)}

    def update(self, context, change, memory):
        units = self.weights.units
        known = [from_memory(memory["activity"], each) for each in units]
        found = activities(units, memory["activity"], context.measured, self.decay)
        active = [jnp.where(change.accepted, new, old) for new, old in zip(found, known, strict=True)]
        are_dormant = [replacement.dormant(activity_U, self.dormant_below) for activity_U in active]
        total = sum(mask_U.size for mask_U in are_dormant)
        before = context.state.params  # which a rejected update leaves
        adopted = jax.tree.map(lambda old, new: jnp.where(change.accepted, new, old), before, change.params)
        return change, {"activity": to_memory(active, units)}, {
            "dormant_share": sum(mask_U.sum() for mask_U in are_dormant) / jnp.float32(total),
            "weight_norm": optax.tree.norm(adopted),
        }  # fmt: skip
