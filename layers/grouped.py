# SPDX-License-Identifier: Apache-2.0
"""Products of rows that lie in groups, each group with a weight of its own.

On a TPU by JAX's Pallas kernels for them (megablox; arXiv:2211.15841), since the TPU compiler takes as long for the
weights' gradient of `jax.lax.ragged_dot` as if every group had all rows. Letters: S rows, D columns that are summed, F
columns of the result, E groups.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm

from layers.axes import platform
from layers.products import project

BLOCK = 128  # rows; on a CPU a group is so many times a number
TILE_ROWS, TILE = 512, 1024  # of the kernel: rows, and columns of both kinds
LANES = 128  # of which a tile's columns are a multiple, since the backward pass takes each kind in the other's place


def aligned(sizes_E: jax.Array) -> jax.Array:
    """Return int32 [E]: how many rows groups of these sizes are to have, those that are added being zero."""
    return -(-sizes_E // _block()) * _block()


def num_rows(rows: int, num_groups: int) -> int:
    """Return how many rows there are to be for so many in groups of any sizes, all of them `aligned`."""
    return math.ceil((rows + num_groups * (_block() - 1)) / TILE_ROWS) * TILE_ROWS


def grouped(x_SD: jax.Array, weights_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Return [S, F] in the type of `x`: the rows of each group times the group's weights.

    Behind the last group it is anything, not a number included, and so is the gradient of `x`.

    Args:
      x_SD: S is what `num_rows` returned; behind the last group it is zero.
      weights_EDF: used in the type of `x`.
      sizes_E: int32, `aligned`.
    """
    weights_EDF = weights_EDF.astype(x_SD.dtype)
    if platform() == "cpu":
        return _by_block(x_SD, weights_EDF, sizes_E)
    if platform() == "tpu":
        return kernel(x_SD, weights_EDF, sizes_E)
    return jax.lax.ragged_dot(x_SD, weights_EDF, sizes_E)


def kernel(x_SD: jax.Array, weights_EDF: jax.Array, sizes_E: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Return what `grouped` does, by the kernel."""
    _, D, F = weights_EDF.shape
    tiling = (TILE_ROWS, *(min(TILE, math.ceil(size / LANES) * LANES) for size in (D, F)))
    return gmm(x_SD, weights_EDF, sizes_E, x_SD.dtype, tiling, None, None, False, interpret)


def _by_block(x_SD: jax.Array, weights_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Return what `grouped` does as a product for each block of rows: XLA's CPU backend has none for groups."""
    (S, D), (E, _, F) = x_SD.shape, weights_EDF.shape
    group_of_block = jnp.searchsorted(jnp.cumsum(sizes_E) // BLOCK, jnp.arange(S // BLOCK), side="right")
    blocks = x_SD.reshape(S // BLOCK, BLOCK, D)
    y = project("ECD,EDF->ECF", blocks, weights_EDF[jnp.minimum(group_of_block, E - 1)])
    return y.reshape(S, F)


def _block() -> int:
    return BLOCK if platform() == "cpu" else 1
