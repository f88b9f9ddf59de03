# SPDX-License-Identifier: Apache-2.0
"""Rotary positions (arXiv:2104.09864, equation 34), in the rotate-half pairing of Llama: i with i + H/2.

And three ways to stretch them over sequences `factor` times as long as those that the weights were first trained on:

- linear: every frequency is divided by the factor (arXiv:2306.15595, equation 4);
- llama3: a pair that turns 4 times or more within the original length stays, one that turns less than once is divided
  by the factor, between them in proportion to the turns (as published with the Llama 3.1 models);
- yarn: the same by 32 turns and 1, between them in proportion to the index of the pair; and scores grow by
  (0.1 ln factor + 1)^2 (arXiv:2309.00071, sections 3.2 and 3.4). In the paper the part between is in proportion to
  the turns; in its authors' code, and so in the models that were trained with it, as here.
"""

import math

import jax
import jax.numpy as jnp

from layers.axes import platform


def rotary_frequencies(
    head_dim: int, theta: float, scaling: str = "none", factor: float = 1.0, original_length: int = 0
) -> tuple[jax.Array, float]:
    """Return (float32 [head_dim / 2] in radians a token, magnitude of rotated queries and keys).

    Args:
      scaling: none, linear, llama3 or yarn.
      factor: at least 1.
      original_length: in tokens; of llama3 and yarn.
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling == "none":
        return frequencies, 1.0
    kept, magnitude = 0.0, 1.0
    if scaling == "llama3":
        turns = original_length * frequencies / (2 * math.pi)
        kept = jnp.clip((turns - 1) / (4 - 1), 0, 1)
    if scaling == "yarn":
        kept = _kept_by_yarn(head_dim, theta, original_length)
        magnitude = 0.1 * math.log(factor) + 1
    return frequencies * (kept + (1 - kept) / factor), magnitude


def _kept_by_yarn(head_dim: int, theta: float, original_length: int) -> jax.Array:
    """Return how much of each pair's frequency stays: 1 up to that of 32 turns, 0 from that of one turn on."""

    def pair(turns: float) -> float:
        return head_dim * math.log(original_length / (2 * math.pi * turns)) / (2 * math.log(theta))

    first = max(math.floor(pair(32)), 0)
    last = min(math.ceil(pair(1)), head_dim - 1)
    pairs = jnp.arange(head_dim // 2, dtype=jnp.float32)
    return 1 - jnp.clip((pairs - first) / max(last - first, 1e-3), 0, 1)


def rotary_angles(
    positions_BT: jax.Array, frequencies: jax.Array, magnitude: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Return (cos, sin), each float32 [B, T, 1, H / 2], of position * frequency, times the magnitude."""
    angles = positions_BT[:, :, None, None].astype(jnp.float32) * frequencies
    # Without the barrier XLA computes sines and cosines again in every layer, for every head.
    return jax.lax.optimization_barrier((magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)))


def rotate(x_BTNH: jax.Array, angles: tuple[jax.Array, jax.Array] | None) -> jax.Array:
    """Rotate each pair of the head dim by its angle, in float32, if there are any; the type stays the input's."""
    if angles is None:
        return x_BTNH
    cos, sin = angles
    if platform() == "tpu":
        return _rotate_by_product(x_BTNH, cos, sin).astype(x_BTNH.dtype)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)


def _rotate_by_product(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Return float32 x cos + (x R) sin, where x R = (-second, first): a TPU is slow at taking halves of 128 lanes."""
    cos, sin = (jnp.concatenate([half, half], axis=-1) for half in (cos, sin))
    one = jnp.eye(x_BTNH.shape[-1] // 2, dtype=x_BTNH.dtype)
    R_HH = jnp.block([[0 * one, one], [-one, 0 * one]])
    turned_BTNH = jnp.matmul(x_BTNH, R_HH, precision="highest", preferred_element_type=jnp.float32)  # exact
    return x_BTNH.astype(jnp.float32) * cos + turned_BTNH * sin
