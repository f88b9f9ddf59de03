# SPDX-License-Identifier: Apache-2.0
"""A learned map from one width to another."""

import jax
from flax import nnx

from layers.axes import weight
from layers.fsdp import all_gather_params
from layers.products import einsum


class Projection(nnx.Module):
    """[B, T, in_dim] to [B, T, out_dim], in the type of the input; `axes` are the logical names of the two widths."""

    def __init__(self, *, in_dim: int, out_dim: int, axes=("embed", None), rngs: nnx.Rngs):
        self.axes = axes
        self.kernel = weight(rngs, (in_dim, out_dim), axes, in_dim**-0.5)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Return the product with the kernel."""
        return einsum("BTD,DE->BTE", x_BTD, all_gather_params(self.kernel[...], self.axes, x_BTD.dtype))
