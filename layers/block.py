# SPDX-License-Identifier: Apache-2.0
"""The decoder block, and the stack that repeats it.

The stack stores one array [layers, ...] per weight, however it is executed: scanned (one compiled body) or
unrolled (faster on CPU), with or without rematerialisation.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from layers.attention import Attention
from layers.axes import constrain
from layers.mlp import SwiGLU
from layers.normalization import RMSNorm

REMAT = {  # names of what the forward pass keeps for the backward pass; the rest is computed again
    "full": (),
    "attention": ("query", "key", "value", "attended"),
    "dots": ("query", "key", "value", "attended", "gate", "up"),
}


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, *, embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int, mlp_dim: int, qk_norm: bool,
        epsilon: float, score_cap: float, out_scale: float, rngs: nnx.Rngs,
    ):  # fmt: skip
        self.attention_norm = RMSNorm(embed_dim, epsilon=epsilon)
        self.attention = Attention(
            embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            qk_norm=qk_norm, epsilon=epsilon, score_cap=score_cap, out_scale=out_scale, rngs=rngs,
        )  # fmt: skip
        self.mlp_norm = RMSNorm(embed_dim, epsilon=epsilon)
        self.mlp = SwiGLU(embed_dim=embed_dim, mlp_dim=mlp_dim, out_scale=out_scale, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, angles: tuple, mask_BTS: jax.Array, cache: dict | None):
        """Return ([B, T, D], cache of this layer)."""
        y_BTD, cache = self.attention(self.attention_norm(x_BTD), angles, mask_BTS, cache)
        x_BTD = constrain(x_BTD + y_BTD, "batch", "length", "act_embed")
        x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return constrain(x_BTD, "batch", "length", "act_embed"), cache


class Stack(nnx.Module):
    """`num_layers` blocks, their weights stacked on a leading axis.

    Args:
      make_block: rngs to one block.
      scan: one compiled body (`lax.scan`) if true, else unrolled.
      remat: "none", or a key of REMAT.
    """

    def __init__(
        self, make_block: Callable[[nnx.Rngs], nnx.Module], *, num_layers: int, scan: bool, remat: str, rngs: nnx.Rngs
    ):
        build = nnx.vmap(make_block, transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.blocks = build(rngs.split(num_layers))
        self.num_layers, self.scan, self.remat = num_layers, scan, remat

    def __call__(self, x_BTD: jax.Array, *context, caches: dict | None = None):
        """Apply all blocks; `caches` has a leading layers axis, as has what is returned beside [B, T, D]."""
        graph, state = nnx.split(self.blocks)

        def apply(x_BTD, layer):
            weights, cache = layer
            return nnx.merge(graph, weights)(x_BTD, *context, cache)

        if self.remat != "none":
            policy = jax.checkpoint_policies.save_only_these_names(*REMAT[self.remat])
            apply = jax.checkpoint(apply, policy=policy, prevent_cse=not self.scan)
        stacked = (nnx.to_pure_dict(state), caches)
        if self.scan:
            return jax.lax.scan(apply, x_BTD, stacked)
        outputs = []
        for layer in unstack(stacked, self.num_layers):
            x_BTD, cache = apply(x_BTD, layer)
            outputs.append(cache)
        return x_BTD, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


def unstack(tree, size: int) -> list:
    """Split the leading axis of every leaf into a list of `size` trees."""
    leaves, structure = jax.tree.flatten(tree)
    return [structure.unflatten(parts) for parts in zip(*[_unstack(leaf) for leaf in leaves], strict=True)][:size]


@jax.custom_vjp
def _unstack(x):
    return [x[i] for i in range(x.shape[0])]


# Plain indexing would be differentiated to a sum of `size` zero-padded copies of the whole stack.
_unstack.defvjp(lambda x: (_unstack(x), None), lambda _, parts: (jnp.stack(parts),))
