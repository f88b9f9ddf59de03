# SPDX-License-Identifier: Apache-2.0
"""Token embedding and output head. D embed, V vocabulary.

The embedding's entries have variance 1/D and are multiplied by sqrt(D) on the way in, unless told otherwise, so that
the same matrix can serve as the head: tokens enter with unit variance, and logits leave with it.
"""

import jax
from flax import nnx

from layers.axes import constrain, weight
from layers.shards import whole


class Embedding(nnx.Module):
    """Token ids [B, T] to vectors [B, T, D], of unit variance by the usual scale.

    Args:
      scale: factor on what enters; 0: sqrt(D).
    """

    def __init__(self, *, vocab_size: int, embed_dim: int, rngs: nnx.Rngs, scale: float = 0.0):
        self.scale = scale or embed_dim**0.5
        self.embedding = weight(rngs, (vocab_size, embed_dim), ("vocab", "embed"), embed_dim**-0.5)

    def __call__(self, tokens_BT: jax.Array, dtype) -> jax.Array:
        # The table is gathered over fsdp in the compute type before the look-up: rows are split over `model` alone.
        table_VD = whole(self.embedding[...], ("vocab", "embed"), dtype)
        table_VD = constrain(table_VD.astype(dtype), "vocab", "act_embed")
        x_BTD = table_VD[tokens_BT] * self.scale
        return constrain(x_BTD, "batch", "length", "act_embed")


class Head(nnx.Module):
    """The weight [D, V] from the normalised stream to logits; applied by the loss and by decoding."""

    def __init__(self, *, vocab_size: int, embed_dim: int, rngs: nnx.Rngs):
        self.kernel = weight(rngs, (embed_dim, vocab_size), ("embed", "vocab"), embed_dim**-0.5)
