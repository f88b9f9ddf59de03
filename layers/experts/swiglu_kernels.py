# SPDX-License-Identifier: Apache-2.0
"""The SwiGLU of experts on a TPU: grouped products with the element-wise steps between them inside the kernels.

JAX's grouped kernels (megablox; arXiv:2211.15841) compute products alone, so the steps between them read and write all
hidden units in main memory again. `_product_then` computes a tile of a product as megablox does, and applies a function
to it before it leaves the core. Letters: S rows, D columns of the stream, F hidden units of an expert, E experts,
C columns of a product or of a tile of it, M rows of a tile or of a strip of it.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.ops import backend as megablox

LANES, SUBLANES = 128, 8  # of a core: tiles have multiples of LANES columns and of SUBLANES rows
TILE_ROWS, TILE_BYTES = 512, 2048  # rows of a tile, as in grouped.py, and bytes of its columns
WIDTH_BYTES = 1024  # of the columns of tiles that leave `_product_then`, since a core holds several of these
STRIP = 128  # rows of a tile that the function takes at a time, so that its intermediate values fit in a core


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def swiglu(
    x_SD: jax.Array, factors_S: jax.Array, weights: tuple, sizes_E: jax.Array, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (y [S, D], gate [S, F], up [S, F]) of the rows of each group; rows after the last group are undefined.

    y = (factor * silu(gate) * up) down, with gate and up the products of `x` with the first two weights. Gradients
    that flow into gate and up are ignored.

    Args:
      x_SD: S is a multiple of TILE_ROWS.
      factors_S: float32.
      weights: gate and up [E, D, F], down [E, F, D], in the type of `x`.
      sizes_E: int32, the number of rows of each group.
    """
    return _forward(x_SD, factors_S, weights, sizes_E, interpret)[0]


def _forward(x_SD, factors_S, weights, sizes_E, interpret):
    into_gate, into_up, out_of_hidden = weights
    gate_SF = _bits_named(product(x_SD, into_gate, sizes_E, interpret=interpret), "gate")
    up_SF, hidden_SF = _product_then(
        _hidden, x_SD, into_up, sizes_E, tiles=(gate_SF,), factors_S=factors_S, outs=2, interpret=interpret
    )
    up_SF = checkpoint_name(up_SF, "up")  # only the backward pass reads it: the kernel writes it where it is saved
    y_SD = product(hidden_SF, out_of_hidden, sizes_E, interpret=interpret)
    return (y_SD, gate_SF, up_SF), (x_SD, factors_S, weights, sizes_E, gate_SF, up_SF)


def _backward(interpret, saved, gradients):
    x_SD, factors_S, (into_gate, into_up, out_of_hidden), sizes_E, gate_SF, up_SF = saved
    of_y_SD, _, _ = gradients
    of_gate_SF, of_up_SF, hidden_SF, of_factors = _product_then(
        _hidden_gradients, of_y_SD, out_of_hidden, sizes_E, tiles=(gate_SF, up_SF), factors_S=factors_S, outs=3,
        sums_rows=True, in_place=True, transposed=True, interpret=interpret,
    )  # fmt: skip
    of_weights = tuple(
        _weights_gradient(rows, gradient, sizes_E, interpret)
        for rows, gradient in ((x_SD, of_gate_SF), (x_SD, of_up_SF), (hidden_SF, of_y_SD))
    )
    of_x_SD = sum(
        product(gradient, weight, sizes_E, transposed=True, interpret=interpret)
        for gradient, weight in ((of_gate_SF, into_gate), (of_up_SF, into_up))
    )
    return of_x_SD, of_factors, of_weights, None


swiglu.defvjp(_forward, _backward)


def product(
    x_SD: jax.Array, weights: jax.Array, sizes_E: jax.Array, *, transposed: bool = False, interpret: bool = False
) -> jax.Array:
    """Return [S, C]: the rows of each group times its weight [D, C], or [C, D] if `transposed`; it has no gradient."""
    D, C = weights.shape[1:][:: -1 if transposed else 1]
    tiling = TILE_ROWS, _tile(D, x_SD.dtype), _tile(C, x_SD.dtype)
    return megablox.gmm(x_SD, weights, sizes_E, x_SD.dtype, tiling, transpose_rhs=transposed, interpret=interpret)


def _weights_gradient(x_SD: jax.Array, gradient_SC: jax.Array, sizes_E: jax.Array, interpret: bool) -> jax.Array:
    """Return [E, D, C]: for each group the product of the transposed rows of `x` and those of the gradient."""
    tiling = TILE_ROWS, *(_tile(rows.shape[1], rows.dtype) for rows in (x_SD, gradient_SC))
    return megablox.tgmm(x_SD.swapaxes(0, 1), gradient_SC, sizes_E, x_SD.dtype, tiling, interpret=interpret)


def _tile(size: int, dtype, most_bytes: int = TILE_BYTES) -> int:
    """Return the columns of a tile: whole lanes of up to `most_bytes`, or enough for all."""
    return min(most_bytes // dtype.itemsize, math.ceil(size / LANES) * LANES)


def _bits_named(x: jax.Array, name: str) -> jax.Array:
    """Name the bits of `x` for rematerialisation: JAX would round a float that is saved and used in another pass."""
    bits = jax.lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])
    return jax.lax.bitcast_convert_type(checkpoint_name(bits, name), x.dtype)


def _hidden(up_MC, gate_MC, factors_M1):
    """Return (up, hidden); hidden units are computed from `up` as it is saved."""
    up_MC, gate = up_MC.astype(gate_MC.dtype), gate_MC.astype(jnp.float32)
    return up_MC, factors_M1 * jax.nn.silu(gate) * up_MC.astype(jnp.float32)


def _hidden_gradients(of_hidden_MC, gate_MC, up_MC, factors_M1):
    """Return (gradient of gate, gradient of up, hidden, the terms of each row's gradient of its factor)."""
    gate, up = gate_MC.astype(jnp.float32), up_MC.astype(jnp.float32)
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    scaled = factors_M1 * of_hidden_MC
    of_gate = scaled * up * (sigmoid + silu * (1 - sigmoid))
    return of_gate, scaled * silu, factors_M1 * silu * up, of_hidden_MC * silu * up


# Under jit, since JAX removes an unused jit from what is recomputed, but no unused kernel.
@functools.partial(jax.jit, static_argnames=("function", "outs", "sums_rows", "in_place", "transposed", "interpret"))
def _product_then(
    function: Callable, x_SD: jax.Array, weights: jax.Array, sizes_E: jax.Array, *, tiles: Sequence[jax.Array],
    factors_S: jax.Array, outs: int, sums_rows: bool = False, in_place: bool = False, transposed: bool = False,
    interpret: bool,
) -> list[jax.Array]:  # fmt: skip
    """Return what a function makes of the grouped product of `x` and the weights and of other arrays.

    Args:
      function: of strips [M, C] of the product, in float32, and of each array of `tiles`, and of factors [M, 1];
        returns the strips of `outs` results [S, C] in the type of `x`.
      weights: [E, D, C], or [E, C, D] if `transposed`.
      tiles: [S, C].
      sums_rows: whether the function returns another strip, whose sums over C are the last result, float32 [S].
      in_place: whether the first results take the memory of `tiles`; a tile is read before it is written.
    """
    (S, D), dtype, C = x_SD.shape, x_SD.dtype, weights.shape[1 if transposed else 2]
    depth, width = _tile(D, dtype), _tile(C, dtype, WIDTH_BYTES)
    across = pl.cdiv(C, width)
    groups, num_visits = megablox.make_group_metadata(  # a visit is of a group to a tile of rows
        group_sizes=sizes_E, m=S, tm=TILE_ROWS, start_group=jnp.int32(0), num_nonzero_groups=len(sizes_E),
        visit_empty_groups=False,
    )  # fmt: skip

    of_x = pl.BlockSpec((TILE_ROWS, depth), lambda n, i, k, firsts, groups, places: (places[i], k))
    of_factors = pl.BlockSpec((TILE_ROWS, 1), lambda n, i, k, firsts, groups, places: (places[i], 0))
    of_tiles = pl.BlockSpec((TILE_ROWS, width), lambda n, i, k, firsts, groups, places: (places[i], n))
    of_sums = pl.BlockSpec((SUBLANES, TILE_ROWS), lambda n, i, k, firsts, groups, places: (n, places[i]))
    of_weights = pl.BlockSpec((None, depth, width), lambda n, i, k, firsts, groups, places: (groups[i], k, n))
    if transposed:
        of_weights = pl.BlockSpec((None, width, depth), lambda n, i, k, firsts, groups, places: (groups[i], n, k))
    out_shape = [jax.ShapeDtypeStruct((S, C), dtype)] * outs
    moved = (x_SD.nbytes + S * LANES * 4) * across + (len(tiles) + outs) * S * C * dtype.itemsize
    fetches = groups[1].size if depth < D else len(weights)  # of a weight: for each visit, if it is several tiles deep
    moved += fetches * D * C * dtype.itemsize
    results = pl.pallas_call(
        functools.partial(
            _kernel, function=function, num_tiles=len(tiles), outs=outs, transposed=transposed,
            left=(D % depth, C % width),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3, grid=(across, num_visits, pl.cdiv(D, depth)),
            in_specs=[of_x, of_weights, of_factors] + [of_tiles] * len(tiles),
            out_specs=[of_tiles] * outs + [of_sums] * sums_rows,
            scratch_shapes=[pltpu.VMEM((TILE_ROWS, width), jnp.float32)],
        ),
        out_shape=out_shape + [jax.ShapeDtypeStruct((SUBLANES * across, S), jnp.float32)] * sums_rows,
        input_output_aliases={6 + n: n for n in range(len(tiles))} if in_place else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=2 * S * D * C, transcendentals=S * C, bytes_accessed=moved),
        interpret=interpret,
    )(*groups, x_SD, weights, factors_S[:, None], *tiles)  # fmt: skip
    return [*results[:outs], *(sums[::SUBLANES].sum(axis=0) for sums in results[outs:])]


def _kernel(
    firsts, groups, places, x_MD, weight, factors_M1, *refs, function, num_tiles: int, outs: int, transposed: bool,
    left: tuple[int, int],
):  # fmt: skip
    """Add a step of a tile's product; after the last step, store what the function makes of the group's rows.

    Args:
      firsts: the first row of each group, and the end.
      groups: of each visit; `places` are those of its tile.
      left: columns of `x`, and of the product, in the last tile, which ends outside the array; 0: it is whole.
    """
    n, i, k = (pl.program_id(dim) for dim in range(3))
    is_last_column, is_last_step = (where == pl.num_programs(dim) - 1 for dim, where in ((0, n), (2, k)))
    tiles, results, total_MC = refs[:num_tiles], refs[num_tiles:-1], refs[-1]
    begin, end = firsts[groups[i]], firsts[groups[i] + 1]
    dim = 1 if transposed else 0

    @pl.when(k == 0)
    def _():
        total_MC[...] = jnp.zeros_like(total_MC)

    x, w = x_MD[...], weight[...]
    if left[0]:
        x, w = _inside(x, 1, is_last_step, left[0]), _inside(w, dim, is_last_step, left[0])
    total_MC[...] += jax.lax.dot_general(x, w, (((1,), (dim,)), ((), ())), preferred_element_type=jnp.float32)

    @pl.when(is_last_step)
    def _():
        @pl.loop(0, TILE_ROWS, step=STRIP)
        def _(first):
            strip, at = pl.ds(first, STRIP), places[i] * TILE_ROWS + first

            def is_of_group(shape, dim):
                row = at + jax.lax.broadcasted_iota(jnp.int32, shape, dim)
                return (begin <= row) & (row < end)

            given = [ref[strip, :] for ref in (total_MC, *tiles)]
            if left[1]:
                given = [_inside(part, 1, is_last_column, left[1]) for part in given]
            strips = function(*given, factors_M1[strip, :])
            for result, value in zip(results[:outs], strips[:outs], strict=True):
                own_M1 = is_of_group((STRIP, 1), 0)
                result[strip, :] = jnp.where(own_M1, value.astype(result.dtype), result[strip, :])
            for sums, terms_MC in zip(results[outs:], strips[outs:], strict=True):
                own_1M = is_of_group((1, STRIP), 1)
                sums[:, strip] = jnp.where(own_1M, _sums_along_lanes(terms_MC), sums[:, strip])


def _sums_along_lanes(terms_MC: jax.Array) -> jax.Array:
    """Return [SUBLANES, M], equal rows: the sum of each row of terms, by a product, which turns rows into lanes."""
    ones = jnp.ones((SUBLANES, terms_MC.shape[1]), jnp.float32)
    exact = dict(precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return jax.lax.dot_general(ones, terms_MC, (((1,), (1,)), ((), ())), **exact)


def _inside(x: jax.Array, dim: int, is_last: jax.Array, size: int) -> jax.Array:
    """Return a tile with zeros from index `size` of a dimension on, where the last tile is outside the array."""
    is_inside = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim) < jnp.where(is_last, size, x.shape[dim])
    return jnp.where(is_inside, x, jnp.zeros_like(x))
