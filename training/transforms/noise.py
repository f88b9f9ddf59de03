# SPDX-License-Identifier: Apache-2.0
"""The gradient noise scale: the batch size beyond which a larger batch helps little (arXiv:1812.06162).

Its simple form is tr(Sigma) / |G|^2, where G is the true gradient and Sigma the covariance of the gradient of one row.
It is estimated from the squared norms of the gradients of parts of a batch and of the full batch (appendix A.1). Parts
are microbatches, and data-parallel copies or devices if each computes its own gradient.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from settings import ramp
from training.step import mean
from training.step_transform import StepTransform

DECAY = 0.99  # a step, of the running means of both estimates; each estimate is unbiased but noisy
LARGEST = 1e9  # rows; reported if the noise hides the gradient


def make(config, weights, schedule) -> "Noise | None":
    """Return it if a configuration asks for the noise scale, or for a ramp that follows it."""
    return Noise() if ramp.measures_noise(config) else None


class Noise(StepTransform):
    """Report the scalar `noise_scale`, in rows."""

    name = "noise"
    measures_parts = True

    def init(self, params: dict) -> dict:
        """Return the initial memory: float32 scalars, running means of |G|^2 and of tr(Sigma) per row."""
        return {"gradient": jnp.float32(0), "noise": jnp.float32(0)}

    def update(self, context, change, memory):
        rows = jax.tree.leaves(context.batch)[0].shape[0]
        memory = update(memory, context.part_square, context.batch_square, rows, context.num_parts)
        return change, memory, {"noise_scale": estimate(memory)}


def part_square(norm: Callable, gradients: dict, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (|sum of gradients|^2 / weight, weight) of one part; the sum over parts is a weighted mean square.

    With these weights, parts of unequal weight count like parts of equal weight. `norm` is that of the full batch.
    """
    return mean((norm(gradients) ** 2, weight)), weight


def update(memory: dict, small: jax.Array, big: jax.Array, rows: int, num_parts: int) -> dict:
    """Return the memory after a step (equations A.2).

    `small` is the mean squared norm of the gradients of `num_parts` parts of the batch of `rows`, `big` that of all.
    """
    part = rows / num_parts
    estimates = {
        "gradient": (rows * big - part * small) / (rows - part),
        "noise": (small - big) / (1 / part - 1 / rows),
    }
    return {name: DECAY * memory[name] + (1 - DECAY) * estimates[name] for name in memory}


def estimate(memory: dict) -> jax.Array:
    """Return the noise scale in rows, at most LARGEST; the bias from zero initial means cancels in the quotient."""
    noise = jnp.maximum(memory["noise"], 0)
    return noise / jnp.maximum(memory["gradient"], jnp.maximum(noise / LARGEST, 1e-30))
