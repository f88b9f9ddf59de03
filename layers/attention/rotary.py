# SPDX-License-Identifier: Apache-2.0
"""Rotary positions (arXiv:2104.09864, equation 34), in the rotate-half pairing of Llama: i with i + H/2.

There are three ways to extend them to sequences `factor` times as long as the original training length:

- linear: divide every frequency by the factor (arXiv:2306.15595, equation 4);
- llama3: keep the frequency of a pair that turns 4 times or more within the original length, divide that of a pair that
  turns less than once by the factor, and interpolate between them by the turns (as published with Llama 3.1);
- yarn: the same with 32 turns and 1, interpolated by the index of the pair; scores grow by (0.1 ln factor + 1)^2
  (arXiv:2309.00071, sections 3.2 and 3.4). The paper interpolates by the turns. The code of its authors, and so the
  models that were trained with it, interpolate by the index.
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
    unscaled, magnitude = 0.0, 1.0
    if scaling == "llama3":
        turns = original_length * frequencies / (2 * math.pi)
        unscaled = jnp.clip((turns - 1) / (4 - 1), 0, 1)
    if scaling == "yarn":
        unscaled = _yarn_unscaled(head_dim, theta, original_length)
        magnitude = 0.1 * math.log(factor) + 1
    return frequencies * (unscaled + (1 - unscaled) / factor), magnitude


def _yarn_unscaled(head_dim: int, theta: float, original_length: int) -> jax.Array:
    """Return the unscaled fraction of each pair's frequency: 1 for 32 turns or more, 0 for one turn or less."""

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
    # Without the barrier XLA recomputes sines and cosines in every layer, for every head.
    return jax.lax.optimization_barrier((magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)))


def rotate(x_BTNH: jax.Array, angles: tuple[jax.Array, jax.Array] | None) -> jax.Array:
    """Rotate each pair of the head dim by its angle in float32; return the input's type. None: return the input."""
    if angles is None:
        return x_BTNH
    cos, sin = angles
    if platform() == "tpu":
        return _rotate_by_product(x_BTNH, cos, sin).astype(x_BTNH.dtype)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)


def _rotate_by_product(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Return float32 x cos + (x R) sin, where x R = (-second, first); a TPU is slow at slicing halves of 128 lanes."""
    cos, sin = (jnp.concatenate([half, half], axis=-1) for half in (cos, sin))
    one = jnp.eye(x_BTNH.shape[-1] // 2, dtype=x_BTNH.dtype)
    R_HH = jnp.block([[0 * one, one], [-one, 0 * one]])
    swapped_BTNH = jnp.matmul(x_BTNH, R_HH, precision="highest", preferred_element_type=jnp.float32)  # exact
    return x_BTNH.astype(jnp.float32) * cos + swapped_BTNH * sin
