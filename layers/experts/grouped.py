# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix products: each group of rows has its own weight.

On a TPU this uses JAX's Pallas kernels (megablox; arXiv:2211.15841). There the weights' gradient of
`jax.lax.ragged_dot` takes as long as if every group had all rows. Letters: S rows, D contracted columns, F columns of
the result, E groups.
"""

import math

import jax
import jax.numpy as jnp

from layers.axes import platform
from layers.products import einsum

BLOCK = 128  # rows; on a CPU the size of a group is a multiple of it
TILE_ROWS, TILE = 512, 1024  # of the kernel: rows, and columns of both kinds
LANES = 128  # a tile's columns are a multiple of it in both kinds, since the backward pass swaps the kinds


def aligned(sizes_E: jax.Array) -> jax.Array:
    """Return int32 [E]: the sizes of groups padded with zero rows."""
    return -(-sizes_E // _block()) * _block()


def num_rows(rows: int, num_groups: int) -> int:
    """Return the padded number of rows that suffices for `rows` rows in groups of any sizes, all `aligned`."""
    return math.ceil((rows + num_groups * (_block() - 1)) / TILE_ROWS) * TILE_ROWS


def grouped(x_SD: jax.Array, weights_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Return [S, F] in the type of `x`: the rows of each group times the group's weights.

    Rows after the last group are undefined and may be NaN, here and in the gradient of `x`.

    Args:
      x_SD: S is the result of `num_rows`; rows after the last group are zero.
      weights_EDF: cast to the type of `x`.
      sizes_E: int32, `aligned`.
    """
    weights_EDF = weights_EDF.astype(x_SD.dtype)
    if platform() == "cpu":
        return _by_block(x_SD, weights_EDF, sizes_E)
    if platform() == "tpu":
        return kernel(x_SD, weights_EDF, sizes_E)
    return jax.lax.ragged_dot(x_SD, weights_EDF, sizes_E)


def kernel(x_SD: jax.Array, weights_EDF: jax.Array, sizes_E: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Compute the same as `grouped` by the Pallas kernel."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm  # with the compiler of kernels, which few models need

    _, D, F = weights_EDF.shape
    tiling = (TILE_ROWS, *(min(TILE, math.ceil(size / LANES) * LANES) for size in (D, F)))
    return gmm(x_SD, weights_EDF, sizes_E, x_SD.dtype, tiling, None, None, False, interpret)


def _by_block(x_SD: jax.Array, weights_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Compute the same as `grouped` by one product for each block of rows; XLA's CPU backend has no grouped product."""
    (S, D), (E, _, F) = x_SD.shape, weights_EDF.shape
    group_of_block = jnp.searchsorted(jnp.cumsum(sizes_E) // BLOCK, jnp.arange(S // BLOCK), side="right")
    blocks = x_SD.reshape(S // BLOCK, BLOCK, D)
    y = einsum("ECD,EDF->ECF", blocks, weights_EDF[jnp.minimum(group_of_block, E - 1)])
    return y.reshape(S, F)


def _block() -> int:
    return BLOCK if platform() == "cpu" else 1
