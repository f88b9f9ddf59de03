# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix products, and the SwiGLU of experts: each group of rows has its own weights.

On a TPU these are Pallas kernels (layers/experts/swiglu_kernels.py), elsewhere products of blocks of rows.
`jax.lax.ragged_dot` would take as long as if every group had all rows: on a TPU its weights' gradient, on a CPU and a
GPU the product itself. Letters: S rows, C rows of a block, D contracted columns, F columns of the result, E groups.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from layers.axes import platform
from layers.embeddings import look_up
from layers.products import einsum, einsum_f32, with_precision

BLOCK = {"cpu": 128, "gpu": 256, "tpu": 1}  # rows; the size of a group is a multiple of it
TILE_ROWS = 512  # of the kernels on a TPU


def aligned(sizes_E: jax.Array) -> jax.Array:
    """Return int32 [E]: the sizes of groups padded with zero rows."""
    block = BLOCK[platform()]
    return -(-sizes_E // block) * block


def num_rows(rows: int, num_groups: int) -> int:
    """Return the padded number of rows that suffices for `rows` rows in groups of any sizes, all `aligned`."""
    return math.ceil((rows + num_groups * (BLOCK[platform()] - 1)) / TILE_ROWS) * TILE_ROWS


def swiglu(
    x_SD: jax.Array, factors_S: jax.Array, weights: tuple, sizes_E: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (y [S, D], gate [S, F], up [S, F]), in the type of `x`, as `composed` does for the rows of each group.

    A TPU rounds hidden units once, and not after each step. Rows after the last group are undefined and may be NaN,
    here and in the gradients of `x` and the factors. On a TPU, gradients that flow into gate and up are ignored.

    Args:
      x_SD: S is the result of `num_rows`; rows after the last group are zero.
      weights: gate and up [E, D, F], down [E, F, D]; cast to the type of `x`.
      sizes_E: int32, `aligned`.
    """
    weights = tuple(weight.astype(x_SD.dtype) for weight in weights)
    if platform() == "tpu":
        from layers.experts import swiglu_kernels  # with the compiler of kernels, which few models need

        return with_precision(swiglu_kernels.swiglu, x_SD.dtype)(x_SD, factors_S, weights, sizes_E)
    product = by_block if platform() == "cpu" else in_a_loop
    return composed(lambda x, weight: product(x, weight, sizes_E), x_SD, factors_S, weights)


def composed(matmul: Callable, x: jax.Array, factors: jax.Array, weights: tuple) -> tuple:
    """Return (y, gate, up): y = (factor * silu(gate) * up) down, with `matmul` for products of rows and weights.

    Args:
      factors: float32, one for each row of `x`.
    """
    gate, up = (checkpoint_name(matmul(x, w), name) for w, name in zip(weights, ("gate", "up"), strict=False))
    hidden = factors[..., None] * (jax.nn.silu(gate) * up)
    return matmul(hidden.astype(x.dtype), weights[2]), gate, up


def by_block(x_SD: jax.Array, weights_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Return [S, F]: the rows of each group times its weight, by one product for each block of rows.

    XLA's CPU backend has no grouped product. The gradients of a group's blocks are summed in float32, as by `look_up`.
    """
    blocks = _blocks(x_SD, BLOCK["cpu"])
    groups = _groups(sizes_E, len(blocks), BLOCK["cpu"])
    of_blocks = look_up(weights_EDF.reshape(len(weights_EDF), -1), groups).reshape(-1, *weights_EDF.shape[1:])
    return einsum("ECD,EDF->ECF", blocks, of_blocks).reshape(len(x_SD), -1)


@jax.custom_vjp
def in_a_loop(x_SD: jax.Array, weights_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Compute the same as `by_block` by a loop over blocks of rows, which holds the weights of one block at a time."""
    return _loop("CD,DF->CF", x_SD, weights_EDF, sizes_E)


def _in_a_loop_backward(operands, gradient_SF):
    x_SD, weights_EDF, sizes_E = operands
    blocks = _blocks(x_SD, BLOCK["gpu"]), _blocks(gradient_SF, BLOCK["gpu"])

    def add(total_EDF, block):
        x_CD, gradient_CF, group = block
        return total_EDF.at[group].add(einsum_f32("CD,CF->DF", x_CD, gradient_CF)), None

    groups = _groups(sizes_E, len(blocks[0]), BLOCK["gpu"])
    of_weights_EDF, _ = jax.lax.scan(add, jnp.zeros(weights_EDF.shape, jnp.float32), (*blocks, groups))
    return _loop("CF,DF->CD", gradient_SF, weights_EDF, sizes_E), of_weights_EDF.astype(weights_EDF.dtype), None


in_a_loop.defvjp(lambda *operands: (in_a_loop(*operands), operands), _in_a_loop_backward)


def _loop(spec: str, x: jax.Array, weights_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Return the einsum of each block of rows and the weights of its group."""
    blocks = _blocks(x, BLOCK["gpu"])
    groups = _groups(sizes_E, len(blocks), BLOCK["gpu"])
    y = jax.lax.map(lambda block: einsum(spec, block[0], weights_EDF[block[1]]), (blocks, groups))
    return y.reshape(len(x), -1)


def _blocks(x: jax.Array, size: int) -> jax.Array:
    """Return rows as [number of blocks, size, columns]."""
    return x.reshape(-1, size, x.shape[1])


def _groups(sizes_E: jax.Array, num_blocks: int, size: int) -> jax.Array:
    """Return int32 [num_blocks]: the group of each block, the last one for blocks after it."""
    found = jnp.searchsorted(jnp.cumsum(sizes_E) // size, jnp.arange(num_blocks), side="right")
    return jnp.minimum(found, len(sizes_E) - 1)
