# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation: x / sqrt(mean(x^2) + epsilon) * scale (arXiv:1910.07467, equation 4)."""

import jax
import jax.numpy as jnp
from flax import nnx

from layers.axes import scale


def normalized(x: jax.Array, epsilon: float, axis: int = -1) -> jax.Array:
    """Return float32 x / sqrt(mean(x^2) + epsilon), the mean over one dimension."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=axis, keepdims=True) + epsilon)


class RMSNorm(nnx.Module):
    """Normalise the last dimension in float32; the result has the type of the input."""

    def __init__(self, size: int, *, epsilon: float, axes: tuple = ("norm",)):
        self.scale = scale(size, axes)
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        return (normalized(x, self.epsilon) * self.scale[...]).astype(x.dtype)
