# SPDX-License-Identifier: Apache-2.0
"""What takes the place of a GPU's attention kernel where a CPU compiles its program: it needs the same memory.

As the kernel does, it keeps its inputs and its result for the backward pass, and never holds the scores of a whole
sequence. The schedule gives instructions in its scope the price of the kernel. C is a block of T; other letters are in
layers/attention/attention.py.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from layers.attention import attention
from layers.attention.gpu_kernels import BLOCK, serves

__all__ = ["attend", "serves"]
SCOPE = "in_place_of_a_gpu_kernel"  # rehearsal/roofline.py knows it


def attend(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, *, segments_BT: jax.Array, sliding_window: int = 0,
    score_cap: float = 0.0,
) -> jax.Array:  # fmt: skip
    """Compute the same as `attend` of layers/attention/gpu_kernels.py."""
    assert not sliding_window and not score_cap
    return _attend(q_BTNH, k_BTKH, v_BTKH, segments_BT)


@jax.custom_vjp
def _attend(q_BTNH, k_BTKH, v_BTKH, segments_BT):
    return _by_block(q_BTNH, k_BTKH, v_BTKH, segments_BT)


def _forward(*inputs):
    y_BTNH = checkpoint_name(_by_block(*inputs), "attended")
    return y_BTNH, (*inputs, y_BTNH)


def _backward(residuals: tuple, dy_BTNH):
    *qkv, segments_BT, _ = residuals
    _, pull = jax.vjp(lambda *qkv: _by_block(*qkv, segments_BT), *qkv)
    return *pull(dy_BTNH), None


_attend.defvjp(_forward, _backward)


@jax.named_scope(SCOPE)
def _by_block(q_BTNH, k_BTKH, v_BTKH, segments_BT):
    """Return attention [B, T, N, H], a block of queries at a time."""
    positions_BT = jnp.broadcast_to(jnp.arange(q_BTNH.shape[1]), segments_BT.shape)

    @jax.checkpoint
    def of_block(block):
        q_BCNH, segments_BC, positions_BC = block
        mask_BCT = attention.attention_mask(segments_BC, segments_BT, positions_BC, positions_BT)
        return attention.attend(q_BCNH, k_BTKH, v_BTKH, mask_BCT)

    y = jax.lax.map(of_block, tuple(map(_in_blocks, (q_BTNH, segments_BT, positions_BT))))
    return jnp.moveaxis(y, 0, 1).reshape(q_BTNH.shape)


def _in_blocks(x: jax.Array) -> jax.Array:
    """Return [B, T, ...] as [T / C, B, C, ...]."""
    B, T, *rest = x.shape
    return jnp.moveaxis(x.reshape(B, T // BLOCK, BLOCK, *rest), 1, 0)
