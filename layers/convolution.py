# SPDX-License-Identifier: Apache-2.0
"""A short convolution over positions inside the SwiGLU of a recursive model (URM, arXiv:2512.14693, section 3.2)."""

import jax
import jax.numpy as jnp

from layers.axes import truncated_weight, zeros
from layers.mlp import SwiGLU
from layers.products import add_bias


def short_convolution(x_BTF: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolve each channel over positions with its own kernel.

    out[t] = sum over w of kernel[w] * x[t + w - width // 2], with zeros beyond both ends.

    Args:
      kernel: [width, F], float32, so that its gradient is summed over tokens in float32. The result has the type of x.
    """
    width, length = kernel.shape[0], x_BTF.shape[1]
    padded = jnp.pad(x_BTF, ((0, 0), (width // 2, width), (0, 0)))
    terms = (kernel[place] * padded[:, place : place + length].astype(jnp.float32) for place in range(width))
    return sum(terms).astype(x_BTF.dtype)


class ConvolvedSwiGLU(SwiGLU):
    """A SwiGLU whose hidden units are silu(convolution(silu(gate) * up) + bias).

    Args:
      width: of the convolution, in positions.
    """

    def __init__(self, *, width: int, mlp_dim: int, rngs, **of_swiglu):
        super().__init__(mlp_dim=mlp_dim, rngs=rngs, **of_swiglu)
        self.kernel = truncated_weight(rngs, (width, mlp_dim), (None, "mlp"), width**-0.5)
        self.kernel_bias = zeros((mlp_dim,), ("mlp",))

    def hidden(self, gated: jax.Array) -> jax.Array:
        """Return the convolved units, [B, T, F]."""
        mixed = short_convolution(gated, self.kernel[...].astype(jnp.float32))
        return jax.nn.silu(add_bias(mixed, self.kernel_bias))
