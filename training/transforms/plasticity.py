# SPDX-License-Identifier: Apache-2.0
"""Keep a network able to learn, by the method that plasticity.method names; see training/plasticity/methods.py."""

from configs.errors import ConfigError
from settings.together import OF_UNITS
from training.optimizers import Weights
from training.plasticity.methods import METHODS, Method


def make(config, weights: Weights, schedule) -> Method | None:
    """Return the method of a configuration; ConfigError if it needs hidden units and the model names none."""
    keys = config.plasticity
    if keys.method == "none":
        return None
    if keys.method in OF_UNITS and not weights.units:
        raise ConfigError(
            f"plasticity.method={keys.method} replaces hidden units, and model.name={config.model.name} names none; "
            "use l2_init or shrink_perturb"
        )
    return METHODS[keys.method](weights, keys, config.train.seed)
