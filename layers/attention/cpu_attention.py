# SPDX-License-Identifier: Apache-2.0
"""Attention on one CPU device, in parts of the length: a part of the queries meets no key after it.

It computes the same as `attend` of attention.py with the mask of packed documents. Two things make it faster
(benchmarks/cpu_step.py): with PARTS parts, 5 of 8 scores are computed, and a head's queries lie next to each other, as
XLA's products on a CPU read them. Letters: see attention.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from layers.attention.attention import MASKED, attention_mask, soft_cap
from layers.products import einsum_f32, on_one_cpu

PARTS = 4  # of the length; more would save little, and each is compiled
SHORTEST = 32  # queries of a part; below this, products are too small to be fast


def serves(shape: tuple[int, int], **_) -> bool:
    """Return whether [batch, length] can be computed in parts, on one device: equal ones, and not too short."""
    return on_one_cpu() and shape[1] % PARTS == 0 and shape[1] // PARTS >= SHORTEST


@functools.partial(jax.jit, static_argnames=("sliding_window", "score_cap"))  # traced once for all layers
def attend(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, *, segments_BT: jax.Array, sliding_window: int = 0,
    score_cap: float = 0.0,
) -> jax.Array:  # fmt: skip
    """Compute the same as `attend` of kernels.py."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BKGTH = jnp.moveaxis(q_BTNH.reshape(B, T, K, N // K, H), 1, 3)
    k_BKSH, v_BKSH = k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
    index_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
    parts, size = [], T // PARTS
    for start in range(0, T, size):
        queries = slice(start, start + size)
        keys = slice(max(0, start - sliding_window + 1) if sliding_window else 0, start + size)
        mask = attention_mask(
            segments_BT[:, queries], segments_BT[:, keys], index_BT[:, queries], index_BT[:, keys], sliding_window
        )  # fmt: skip
        parts.append(_attend(q_BKGTH[:, :, :, queries], k_BKSH[:, :, keys], v_BKSH[:, :, keys], mask, score_cap))
    y_BKGTH = jnp.concatenate(parts, axis=3)
    return checkpoint_name(jnp.moveaxis(y_BKGTH, 3, 1).reshape(B, T, N, H), "attended")


def _attend(q_BKGTH, k_BKSH, v_BKSH, mask_BTS, score_cap: float) -> jax.Array:
    """Return attention [B, K, G, T, H] of a part of the queries over the keys that it meets."""
    scores_BKGTS = einsum_f32("BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH) * q_BKGTH.shape[-1] ** -0.5
    scores_BKGTS = jnp.where(mask_BTS[:, None, None], soft_cap(scores_BKGTS, score_cap), MASKED)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BKSH.dtype)
    return einsum_f32("BKGTS,BKSH->BKGTH", weights_BKGTS, v_BKSH).astype(v_BKSH.dtype)
