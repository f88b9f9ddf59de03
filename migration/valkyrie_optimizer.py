# SPDX-License-Identifier: Apache-2.0
"""An optax optimizer that a caller made, in place of the one that the configuration names."""

import dataclasses

import jax.numpy as jnp
import optax

from configs.errors import ConfigError
from core import assembly
from training.step_transform import StepTransform


@dataclasses.dataclass(frozen=True)
class CallersOptimizer(StepTransform):
    """Updates the parameters by `optimizer` alone: without the clipping, decay and schedule of the configuration.

    Its scalar `learning_rate` is NaN, because an optax optimizer does not say what its rate is.
    """

    optimizer: optax.GradientTransformation
    name = "callers_optimizer"

    def init(self, params: dict) -> dict:
        """Return the optimizer's state, whose moments are sharded like their weights."""
        return {"state": self.optimizer.init(params)}

    def update(self, context, change, memory):
        """Return the optimizer's change instead of the configured one, whose state stays as it is."""
        before, optimizer = context.state, optax.with_extra_args_support(self.optimizer)
        updates, state = optimizer.update(
            context.gradients, memory["state"], before.params, value=context.scalars["loss"]
        )  # fmt: skip
        change = change._replace(params=optax.apply_updates(before.params, updates), optimizer=before.optimizer)
        return change, {"state": state}, {"learning_rate": jnp.float32(jnp.nan)}


def assemble(config, devices: list, optimizer: optax.GradientTransformation) -> assembly.Run:
    """Return the run of a configuration that `optimizer` updates.

    Raises:
      ConfigError: `optimizer` is not of optax, or the configuration asks for what follows the configured optimizer.
    """
    if not isinstance(optimizer, optax.GradientTransformation):
        kind = type(optimizer).__name__
        raise ConfigError(f"optimizer={kind} is no optimizer of optax; give one, as optax.adamw(3e-4), or a name")
    config = config.copy_and_resolve_references()
    config.optimizer.name = "adafactor"  # unused; of all optimizers its state is the smallest
    run = assembly.assemble(config, devices=devices, transforms=[CallersOptimizer(optimizer)])
    if others := run.abstract_state.extra.keys() - {"guard", CallersOptimizer.name}:
        raise ConfigError(f"{min(others)} follows the configured optimizer; give that by its name, as adamw")
    return run
