# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation: x / sqrt(mean(x^2) + epsilon) * scale (arXiv:1910.07467, equation 4)."""

import jax
import jax.numpy as jnp
from flax import nnx

from layers.axes import scale, zeros


def normalized(x: jax.Array, epsilon: float, axis: int = -1) -> jax.Array:
    """Return float32 x / sqrt(mean(x^2) + epsilon), the mean over one dimension."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=axis, keepdims=True) + epsilon)


class RMSNorm(nnx.Module):
    """Normalise the last dimension in float32; the result has the type of the input.

    Args:
      from_one: whether the scale is 1 + the parameter, as in Gemma (arXiv:2403.08295).
    """

    def __init__(self, size: int, *, epsilon: float, axes: tuple = ("norm",), from_one: bool = False):
        self.scale = zeros((size,), axes) if from_one else scale(size, axes)
        self.epsilon, self.from_one = epsilon, from_one

    def __call__(self, x: jax.Array) -> jax.Array:
        scale_D = 1 + self.scale[...] if self.from_one else self.scale[...]
        return (normalized(x, self.epsilon) * scale_D).astype(x.dtype)
