# SPDX-License-Identifier: Apache-2.0
"""Rotary positions (arXiv:2104.09864, equation 34), in the rotate-half pairing of Llama: i with i + H/2."""

import jax
import jax.numpy as jnp


def rotary_angles(positions_BT: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Return (cos, sin), each float32 [B, T, 1, head_dim / 2], of position * theta^(-2i / head_dim)."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions_BT[:, :, None, None].astype(jnp.float32) * frequencies
    # Without the barrier XLA computes sines and cosines again in every layer, for every head.
    return jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


def rotate(x_BTNH: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate each pair of the head dim by its angle, in float32; the result has the type of the input."""
    cos, sin = angles
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)
