# SPDX-License-Identifier: Apache-2.0
"""Token embedding and output head. D embed, V vocabulary.

The embedding's entries have variance 1/D. Looked-up vectors are multiplied by sqrt(D), unless `scale` is given. So the
same matrix can also be the head: token vectors and logits both have unit variance.
"""

import jax
from flax import nnx

from layers.axes import constrain, weight
from layers.fsdp import all_gather_params


class Embedding(nnx.Module):
    """Map token ids [B, T] to vectors [B, T, D], of unit variance by the default scale.

    Args:
      scale: factor on the looked-up vectors; 0: sqrt(D).
    """

    def __init__(self, *, vocab_size: int, embed_dim: int, rngs: nnx.Rngs, scale: float = 0.0):
        self.scale = scale or embed_dim**0.5
        self.embedding = weight(rngs, (vocab_size, embed_dim), ("vocab", "embed"), embed_dim**-0.5)

    def __call__(self, tokens_BT: jax.Array, dtype) -> jax.Array:
        # All-gather the table over fsdp in the compute type before the look-up, so only `model` shards its rows.
        table_VD = all_gather_params(self.embedding[...], ("vocab", "embed"), dtype)
        table_VD = constrain(table_VD.astype(dtype), "vocab", "act_embed")
        x_BTD = table_VD[tokens_BT] * self.scale
        return constrain(x_BTD, "batch", "length", "act_embed")


class Head(nnx.Module):
    """The weight [D, V] from the normalised stream to logits; applied by the loss and by decoding."""

    def __init__(self, *, vocab_size: int, embed_dim: int, rngs: nnx.Rngs):
        self.kernel = weight(rngs, (embed_dim, vocab_size), ("embed", "vocab"), embed_dim**-0.5)
