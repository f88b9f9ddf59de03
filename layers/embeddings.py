# SPDX-License-Identifier: Apache-2.0
"""Token embedding and output head. D embed, V vocabulary, S ids of a batch, C ids of a block.

The embedding's entries have variance 1/D. Looked-up vectors are multiplied by sqrt(D), unless `scale` is given. So the
same matrix can also be the head: token vectors and logits both have unit variance.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from layers.axes import constrain, inside_shard_map, platform, weight
from layers.fsdp import all_gather_params
from layers.products import einsum_f32

BLOCK = 1024  # ids whose gradients one product adds on a GPU


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
        x_BTD = look_up(table_VD, tokens_BT) * self.scale
        return constrain(x_BTD, "batch", "length", "act_embed")


class Head(nnx.Module):
    """The weight [D, V] from the normalised stream to logits; applied by the loss and by decoding."""

    def __init__(self, *, vocab_size: int, embed_dim: int, rngs: nnx.Rngs):
        self.kernel = weight(rngs, (embed_dim, vocab_size), ("embed", "vocab"), embed_dim**-0.5)


def look_up(table_VD: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the rows [..., D] of a table; the gradient of a row is summed in float32.

    A sum in bfloat16 stops growing when it is 256 times as large as what is added: of 12,000 equal ids in a batch, most
    of the gradient was lost. A GPU would add in any order. If one GPU holds all ids, it adds in a fixed order.
    """
    return _look_up(len(table_VD), table_VD, ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _look_up(num_rows: int, table_VD: jax.Array, ids: jax.Array) -> jax.Array:
    return table_VD[ids]


def _look_up_backward(num_rows: int, ids: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    on_one = inside_shard_map() or jax.sharding.get_abstract_mesh().size == 1
    added = in_blocks if on_one and platform() == "gpu" else at_once
    total_VD = added(gradient.reshape(-1, gradient.shape[-1]), ids.reshape(-1), num_rows)
    return total_VD.astype(gradient.dtype), None


# Not `table_VD[ids]`: a gradient of a gradient, as MAML's, differentiates this function too.
_look_up.defvjp(lambda num_rows, table_VD, ids: (_look_up(num_rows, table_VD, ids), ids), _look_up_backward)


def at_once(gradient_SD: jax.Array, ids_S: jax.Array, num_rows: int) -> jax.Array:
    """Return float32 [V, D], V = `num_rows`: the sum of the gradients of each id."""
    return jnp.zeros((num_rows, gradient_SD.shape[1])).at[ids_S].add(gradient_SD.astype(jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def in_blocks(gradient_SD: jax.Array, ids_S: jax.Array, num_rows: int) -> jax.Array:
    """Compute the same as `at_once` without atomic additions, so in the same order each time.

    In a block, a product gives each id the sum of all equal ids. Equal ids write the same row with the same bits. The
    derivative is a look-up; JAX's, of writes to equal rows, would keep masks of the whole table.
    """
    ids_S = jnp.where(ids_S < 0, ids_S + num_rows, ids_S)  # the last rows, as when indexing
    size = max(1, min(len(ids_S), BLOCK))
    padding = -len(ids_S) % size
    blocks = (
        jnp.pad(ids_S, (0, padding), constant_values=num_rows).reshape(-1, size),  # no such row: it is not written
        jnp.pad(gradient_SD, ((0, padding), (0, 0))).reshape(-1, size, gradient_SD.shape[1]),
    )

    def add(total_VD, block):
        ids_C, gradient_CD = block
        equal_CC = (ids_C[:, None] == ids_C).astype(gradient_CD.dtype)
        return total_VD.at[ids_C].set(total_VD[ids_C] + einsum_f32("SC,CD->SD", equal_CC, gradient_CD)), None

    return jax.lax.scan(add, jnp.zeros((num_rows, gradient_SD.shape[1])), blocks)[0]


def _in_blocks_backward(num_rows: int, kept: tuple, cotangent_VD: jax.Array) -> tuple[jax.Array, None]:
    ids_S, like = kept
    return look_up(cotangent_VD, ids_S).astype(like.dtype), None


in_blocks.defvjp(
    lambda gradient_SD, ids_S, num_rows: (in_blocks(gradient_SD, ids_S, num_rows), (ids_S, gradient_SD[:0])),
    _in_blocks_backward,
)
