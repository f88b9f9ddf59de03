# SPDX-License-Identifier: Apache-2.0
"""The gradient noise scale: the batch size beyond which a larger one brings little (arXiv:1812.06162).

Its simple form, tr(Sigma) / |G|^2, G the true gradient and Sigma the covariance of one row's, follows from the squared
norms of the gradients of parts of a batch and of the whole batch (appendix A.1). Parts are microbatches, and copies of
the model or devices where these compute each by itself.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

DECAY = 0.99  # a step, of the running means of both estimates, each of which is without bias but noisy
LARGEST = 1e9  # rows; told where the noise hides the gradient


def init() -> dict:
    """Return what is remembered: float32 scalars, running means of |G|^2 and of tr(Sigma) per row."""
    return {"gradient": jnp.float32(0), "noise": jnp.float32(0)}


def part_square(norm: Callable, gradients: dict, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (|sum of gradients|^2 / weight, weight) of one part; of all parts summed it is a mean square as a pair.

    Weighted so, parts of unequal weight count as so many of equal weight. `norm` is what is taken of the whole batch's.
    """
    return norm(gradients) ** 2 / jnp.maximum(weight, 1), weight


def update(memory: dict, small: jax.Array, big: jax.Array, rows: int, num_parts: int) -> dict:
    """Return what is remembered after a step (equations A.2).

    `small` is the mean squared norm of the gradients of `num_parts` parts of the batch of `rows`, `big` that of all.
    """
    part = rows / num_parts
    estimates = {
        "gradient": (rows * big - part * small) / (rows - part),
        "noise": (small - big) / (1 / part - 1 / rows),
    }
    return {name: DECAY * memory[name] + (1 - DECAY) * estimates[name] for name in memory}


def of(memory: dict) -> jax.Array:
    """Return the noise scale in rows, at most LARGEST; that both means begin at 0 falls out of their quotient."""
    noise = jnp.maximum(memory["noise"], 0)
    return noise / jnp.maximum(memory["gradient"], jnp.maximum(noise / LARGEST, 1e-30))
