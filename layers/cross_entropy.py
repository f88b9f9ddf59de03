# SPDX-License-Identifier: Apache-2.0
"""Softmax cross-entropy of a linear head, without all logits in memory.

Tokens go through the head in chunks. The gradient is computed in the same pass, as
d loss / d logits = (1 + 2 z log Z) softmax(logits) - onehot(target), so no logits are computed twice.
z-loss: arXiv:2204.02311, section 5. Letters: B batch, T length of a chunk, D embed, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp

from layers.attention.attention import soft_cap
from layers.products import einsum, einsum_f32


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def cross_entropy(
    x: jax.Array, head_DV: jax.Array, targets: jax.Array, weights: jax.Array,
    num_chunks: int = 1, z_loss: float = 0.0, logit_cap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return float32 sums over tokens of weight * (loss + z_loss * log(Z)^2), and of weight * loss.

    Only the first is differentiable, with respect to `x` and `head_DV`.

    Args:
      x: [B, T, D] in the compute type.
      head_DV: [D, V]; cast to the type of `x`.
      targets: int [B, T].
      weights: float32 [B, T].
      num_chunks: divides T; a chunk takes every num_chunks-th token, so that a sharded T stays balanced.
    """

    def body(sums, chunk):
        (total, loss), _ = _chunk_loss(*chunk, head_DV.astype(x.dtype), z_loss, logit_cap)
        return (sums[0] + total, sums[1] + loss), None

    return jax.lax.scan(body, (jnp.float32(0), jnp.float32(0)), chunks(num_chunks, x, targets, weights))[0]


def log_probabilities(
    x: jax.Array, head_DV: jax.Array, targets: jax.Array, num_chunks: int = 1, logit_cap: float = 0.0,
    temperature: float = 1.0,
) -> jax.Array:  # fmt: skip
    """Return log p(target) of each token in nats, float32 [B, T]; the backward pass recomputes a chunk's logits.

    Arguments are as in `cross_entropy`; `temperature` divides the logits, after their cap. A target less than 0 is
    masked: its result is 0.
    """
    head_DV = head_DV.astype(jnp.float32)  # the type in which the gradients of chunks are added

    @jax.checkpoint
    def of_chunk(chunk):
        x_BTD, targets_BT = chunk
        logits_BTV = soft_cap(einsum_f32("BTD,DV->BTV", x_BTD, head_DV.astype(x.dtype)), logit_cap) / temperature
        target_BT = jnp.take_along_axis(logits_BTV, jnp.maximum(targets_BT, 0)[..., None], axis=-1)[..., 0]
        return jnp.where(targets_BT >= 0, target_BT - jax.nn.logsumexp(logits_BTV, axis=-1), 0)

    return merged(jax.lax.map(of_chunk, chunks(num_chunks, x, targets)))


def chunks(num_chunks: int, *arrays: jax.Array) -> tuple:
    """Return each [B, T, ...] as [num_chunks, B, T / num_chunks, ...], with every num_chunks-th token in a chunk."""

    def split(a):
        return jnp.moveaxis(a.reshape(a.shape[0], -1, num_chunks, *a.shape[2:]), 2, 0)

    return tuple(split(a) for a in arrays)


def merged(parts: jax.Array) -> jax.Array:
    """Return [B, T, ...] of what `chunks` split, [num_chunks, B, T / num_chunks, ...]."""
    parts = jnp.moveaxis(parts, 0, 2)
    return parts.reshape(parts.shape[0], -1, *parts.shape[3:])


def _chunk_loss(x_BTD, targets_BT, weights_BT, head_DV, z_loss, logit_cap):
    """Return ((total, loss), (float32 logits, log Z)) of one chunk."""
    logits_BTV = soft_cap(einsum_f32("BTD,DV->BTV", x_BTD, head_DV), logit_cap)
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_BT = jnp.take_along_axis(logits_BTV, jnp.maximum(targets_BT, 0)[..., None], axis=-1)[..., 0]
    loss_BT = log_z_BT - target_BT
    total = jnp.sum(weights_BT * (loss_BT + z_loss * log_z_BT**2))
    return (total, jnp.sum(weights_BT * loss_BT)), (logits_BTV, log_z_BT)


def _forward(x, head_DV, targets, weights, num_chunks, z_loss, logit_cap):
    """Return the sums, and as residuals the gradients of `x` and `head_DV`."""
    compute_DV = head_DV.astype(x.dtype)

    def body(carry, chunk):
        total, loss, head_gradient_DV = carry
        x_BTD, targets_BT, weights_BT = chunk
        (chunk_total, chunk_loss), (logits_BTV, log_z_BT) = _chunk_loss(*chunk, compute_DV, z_loss, logit_cap)
        slope_BT = weights_BT * (1 + 2 * z_loss * log_z_BT)
        gradient_BTV = slope_BT[..., None] * jnp.exp(logits_BTV - log_z_BT[..., None])
        is_target_BTV = jnp.arange(head_DV.shape[1]) == targets_BT[..., None]
        gradient_BTV -= jnp.where(is_target_BTV, weights_BT[..., None], 0)
        if logit_cap:
            gradient_BTV *= 1 - (logits_BTV / logit_cap) ** 2
        gradient_BTV = gradient_BTV.astype(x.dtype)
        x_gradient_BTD = einsum("BTV,DV->BTD", gradient_BTV, compute_DV)
        head_gradient_DV += einsum_f32("BTD,BTV->DV", x_BTD, gradient_BTV)
        return (total + chunk_total, loss + chunk_loss, head_gradient_DV), x_gradient_BTD

    start = (jnp.float32(0), jnp.float32(0), jnp.zeros(head_DV.shape, jnp.float32))
    (total, loss, head_gradient_DV), parts = jax.lax.scan(body, start, chunks(num_chunks, x, targets, weights))
    return (total, loss), (merged(parts), head_gradient_DV.astype(head_DV.dtype))


def _backward(num_chunks, z_loss, logit_cap, gradients, cotangents):
    x_gradient, head_gradient_DV = gradients
    scale = cotangents[0]
    scaled = [gradient * scale.astype(gradient.dtype) for gradient in (x_gradient, head_gradient_DV)]
    return (*scaled, None, None)


cross_entropy.defvjp(_forward, _backward)
