# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation: x / sqrt(mean(x^2) + epsilon) * scale (arXiv:1910.07467, equation 4)."""

import jax
import jax.numpy as jnp
from flax import nnx

from layers.axes import scale


class RMSNorm(nnx.Module):
    """Normalise the last dimension in float32; the result has the type of the input."""

    def __init__(self, size: int, *, epsilon: float, axes: tuple = ("norm",)):
        self.scale = scale(size, axes)
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)
        return (x32 * inverse * self.scale[...]).astype(x.dtype)
