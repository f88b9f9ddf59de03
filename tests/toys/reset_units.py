# SPDX-License-Identifier: Apache-2.0
"""A toy for tests/test_additions.py: zero the MLP units that are used least, as methods of plasticity do."""

import jax
import jax.numpy as jnp

from training.step_transform import StepTransform

WEIGHT = ("stack", "blocks", "mlp", "down")  # [L, F, D]


def make(config, weights, schedule) -> "ResetUnits | None":
    """Return it if the configuration asks for it."""
    return ResetUnits(config.train.reset_units_every) if config.train.reset_units_every else None


class ResetUnits(StepTransform):
    """Keep a running mean of each unit's outgoing weights, and zero the smallest unit and its moments."""

    name = "reset_units"

    def __init__(self, every: int):
        self.every = every

    def init(self, params):
        """Return the means [L, F, 1], which are sharded like the weight."""
        down = params["stack"]["blocks"]["mlp"]["down"]
        return {"stack": {"blocks": {"mlp": {"down": jnp.zeros((*down.shape[:2], 1))}}}}

    def update(self, context, change, memory):
        """Reset the units every few steps."""
        mean_LF1 = memory["stack"]["blocks"]["mlp"]["down"]
        down_LFD = change.params["stack"]["blocks"]["mlp"]["down"]
        mean_LF1 = 0.9 * mean_LF1 + 0.1 * jnp.mean(jnp.abs(down_LFD), axis=2, keepdims=True)
        is_due = (context.state.step + 1) % self.every == 0
        reset_LF1 = is_due & (mean_LF1 == mean_LF1.min(axis=1, keepdims=True))

        def zeroed(path, leaf):
            keys = tuple(part.key for part in path if isinstance(part, jax.tree_util.DictKey))
            return jnp.where(reset_LF1, 0.0, leaf) if keys[-4:] == WEIGHT else leaf

        params, optimizer = (
            jax.tree_util.tree_map_with_path(zeroed, tree) for tree in (change.params, change.optimizer)
        )
        memory = {"stack": {"blocks": {"mlp": {"down": mean_LF1}}}}
        scalars = {"units_reset": reset_LF1.sum().astype(jnp.float32)}
        return change._replace(params=params, optimizer=optimizer), memory, scalars
