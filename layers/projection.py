# SPDX-License-Identifier: Apache-2.0
"""A learned map from one width to another."""

import jax
from flax import nnx

from layers.axes import weight
from layers.fsdp import all_gather_params
from layers.products import einsum

AXES = ("embed", None)


class Projection(nnx.Module):
    """[B, T, D] to [B, T, out_dim], in the type of the input."""

    def __init__(self, *, embed_dim: int, out_dim: int, rngs: nnx.Rngs):
        self.kernel = weight(rngs, (embed_dim, out_dim), AXES, embed_dim**-0.5)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Return the product with the kernel."""
        return einsum("BTD,DE->BTE", x_BTD, all_gather_params(self.kernel[...], AXES, x_BTD.dtype))
