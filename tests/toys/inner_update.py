# SPDX-License-Identifier: Apache-2.0
"""A toy for tests/test_additions.py: learn weights from which one gradient step learns a task (arXiv:1703.03400)."""

import jax
import jax.numpy as jnp
from flax import nnx

from objectives import language_modeling
from objectives.language_modeling import LanguageModeling

RATE = 0.5
SECOND_ORDER = True


def make(config) -> "InnerUpdate":
    """Return the objective of a configuration."""
    return InnerUpdate(**vars(language_modeling.make(config)))


class InnerUpdate(LanguageModeling):
    """Rows 2 i and 2 i + 1 of a batch are a task: a step on the one, and the loss of the other."""

    def loss(self, model, carry, batch, key):
        """Return the mean loss after the inner step, with the gradient through that step."""
        graph, params = nnx.split(model)

        def loss_of(params, row):
            rows = {name: array[None] for name, array in row.items()}
            (total, weight), _ = super(InnerUpdate, self).loss(nnx.merge(graph, params), {}, rows, None)
            return total / jnp.maximum(weight, 1)

        def of_task(task):
            support, query = ({name: array[i] for name, array in task.items()} for i in (0, 1))
            gradients = jax.grad(loss_of)(params, support)
            gradients = gradients if SECOND_ORDER else jax.lax.stop_gradient(gradients)
            return loss_of(jax.tree.map(lambda p, g: p - RATE * g, params, gradients), query)

        tasks = {name: array.reshape(-1, 2, *array.shape[1:]) for name, array in batch.items()}
        losses = jax.vmap(of_task)(tasks)
        pair = losses.sum(), jnp.float32(len(losses))
        return pair, (carry, {"loss": pair})
