# SPDX-License-Identifier: Apache-2.0
"""Attention of one new token a row over a key-value cache, as a TPU kernel that reads the cache once.

The kernel writes the new key and value into the cache and computes the same as `attend` of attention.py for
T = 1. It goes through the cache in blocks of keys with a running maximum and sum (arXiv:2205.14135, section 3.1). It
does not read the blocks in front of a row's first visible key, or after its new key. The compiler alone would write the
rows of a cache one after the other. It cannot shard a kernel, so a shard_map states the part of each device. Letters:
see attention.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div, rem
from jax.sharding import PartitionSpec

from layers.attention.attention import MASKED, soft_cap
from layers.axes import inside_shard_map, mesh_axes, num_shards
from layers.products import precision

LANES = 128  # heads, and blocks of keys, are multiples of it
TILE = 16  # keys that are written at once; one of them is new
BLOCK_BYTES = 2**20  # of the keys of a block; keys and values are double-buffered in 16 MiB of a chip's own memory
NAME = "decode_kernel"  # rehearsal/roofline.py finds it by this name


def serves(rows: int, length: int, *, head_dim: int, dtype) -> bool:
    """Return whether the kernel supports a cache of this many rows and entries a row, with this type."""
    full_tiles = length % TILE == 0 and head_dim % LANES == 0
    return full_tiles and rows % num_shards(mesh_axes(("batch",))[0]) == 0 and jnp.issubdtype(dtype, jnp.floating)


def extend_and_attend(
    q_B1NH: jax.Array, k_B1KH: jax.Array, v_B1KH: jax.Array, cache: dict, *, mask_B1S: jax.Array, score_cap: float = 0.0
) -> tuple[jax.Array, dict]:
    """Return (attention [B, 1, N, H] in the type of `v`, the cache with the new entries); scores are in float32.

    A row sees its new key, whatever the mask says; that of a row without a token means nothing.

    Args:
      cache: of a layer, without scales; see `extend` of attention.py.
      mask_B1S: bool, the keys that each row sees.
    """
    start_B = jnp.minimum(cache["start"], mask_B1S.shape[2] - 1)
    on_device = functools.partial(_on_device, score_cap=score_cap)
    if not inside_shard_map():
        new, old = mesh_axes(("batch", "kv_heads", None)), mesh_axes(("batch", "kv_heads", None, None))
        rows = PartitionSpec(old[0])
        specs = dict(in_specs=(new, new, new, old, old, rows, rows), out_specs=(new, old, old))
        on_device = jax.shard_map(on_device, **specs, check_vma=False)
    given = q_B1NH[:, 0], k_B1KH[:, 0], v_B1KH[:, 0], cache["key"], cache["value"], mask_B1S, start_B
    y_BNH, key, value = on_device(*given)
    return y_BNH[:, None], cache | {"key": key, "value": value}


def write_rows(rows_BS: jax.Array, new_B1: jax.Array, start_B: jax.Array) -> jax.Array:
    """Return the same as `write_rows` of attention.py for one new entry a row, without a loop over rows."""
    S = rows_BS.shape[1]
    return jnp.where(jnp.arange(S) == jnp.minimum(start_B, S - 1)[:, None], new_B1, rows_BS)


def _on_device(q_BNH, new_k_BKH, new_v_BKH, k_BKSH, v_BKSH, mask_B1S, start_B, *, score_cap: float):
    """Return this device's (attention [B, N, H], keys, values)."""
    (B, N, H), (K, S) = q_BNH.shape, k_BKSH.shape[1:3]
    size = block_size(K, S, H, k_BKSH.dtype.itemsize)
    first_B = jnp.minimum(jnp.argmax(mask_B1S[:, 0], axis=1), start_B) // size
    old_B1S = (mask_B1S & (jnp.arange(S) != start_B[:, None, None])).astype(jnp.int32)

    k_BKSH, v_BKSH = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (k_BKSH, v_BKSH))

    def block(b, j, first_B, start_B):
        return jnp.minimum(first_B[b] + j, div(start_B[b], size))

    queries, new = (pl.BlockSpec((None, heads, H), lambda b, j, *_: (b, 0, 0)) for heads in (N, K))
    keys = pl.BlockSpec((None, K, size, H), lambda b, j, *at: (b, 0, block(b, j, *at), 0))
    mask = pl.BlockSpec((None, 1, size), lambda b, j, *at: (b, 0, block(b, j, *at)))
    tile = pl.BlockSpec((None, K, TILE, H), lambda b, j, first_B, start_B: (b, 0, div(start_B[b], TILE), 0))
    return pl.pallas_call(
        functools.partial(_kernel, length=S, score_cap=score_cap, precision=precision(k_BKSH.dtype)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(B, pl.cdiv(S, size)), in_specs=[queries, new, new, mask, keys, keys],
            out_specs=[queries, tile, tile],
            scratch_shapes=[pltpu.VMEM((K, N // K, width), jnp.float32) for width in (1, 1, H)],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, v_BKSH.dtype) for x in (q_BNH, k_BKSH, v_BKSH)],
        input_output_aliases={6: 1, 7: 2}, name=NAME,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * q_BNH.size * S, transcendentals=B * N * S, bytes_accessed=k_BKSH.nbytes + v_BKSH.nbytes
        ),
    )(first_B, start_B, q_BNH.astype(k_BKSH.dtype), new_k_BKH, new_v_BKH, old_B1S, k_BKSH, v_BKSH)  # fmt: skip


def block_size(K: int, S: int, H: int, bytes_each: int) -> int:
    """Return the number of keys of a block: a multiple of LANES of up to BLOCK_BYTES, or enough for all."""
    fitting = max(1, BLOCK_BYTES // (K * H * bytes_each * LANES))
    return LANES * min(fitting, pl.cdiv(S, LANES))


def _kernel(
    first_B, start_B, q_NH, new_k_KH, new_v_KH, old_1S, k_KSH, v_KSH, y_NH, k_tile_KTH, v_tile_KTH,
    max_KG1, sum_KG1, total_KGH, *, length: int, score_cap: float, precision: jax.lax.Precision | None,
):  # fmt: skip
    """Add a block of a row to the running softmax, which begins with the new key; after the last one, write."""
    b, j = pl.program_id(0), pl.program_id(1)
    K, size, H = k_KSH.shape
    q_KGH = q_NH[...].reshape(K, -1, H)
    einsum = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    block, last = first_B[b] + j, div(start_B[b], size)

    def scores(k_KSH):
        return soft_cap(einsum("KGH,KSH->KGS", q_KGH, k_KSH) * H**-0.5, score_cap)

    @pl.when(j == 0)
    def _():
        max_KG1[...] = scores(new_k_KH[...][:, None])
        sum_KG1[...] = jnp.ones_like(sum_KG1)
        total_KGH[...] = jnp.broadcast_to(new_v_KH[...].astype(jnp.float32)[:, None], total_KGH.shape)

    @pl.when(block <= last)
    def _():
        k, v = k_KSH[...], v_KSH[...]
        seen_1S = old_1S[...] != 0
        if length % size:  # the last block ends outside the array, where any bits may be
            left = length - block * size
            seen_1S &= jax.lax.broadcasted_iota(jnp.int32, (1, size), 1) < left
            v = jnp.where(jax.lax.broadcasted_iota(jnp.int32, (1, size, 1), 1) < left, v, jnp.zeros_like(v))
        scores_KGS = jnp.where(seen_1S[None], scores(k), MASKED)
        new_max_KG1 = jnp.maximum(max_KG1[...], scores_KGS.max(axis=-1, keepdims=True))
        weights_KGS, kept_KG1 = jnp.exp(scores_KGS - new_max_KG1), jnp.exp(max_KG1[...] - new_max_KG1)
        summed_KGH = einsum("KGS,KSH->KGH", weights_KGS.astype(v.dtype), v)
        max_KG1[...] = new_max_KG1
        sum_KG1[...] = kept_KG1 * sum_KG1[...] + weights_KGS.sum(axis=-1, keepdims=True)
        total_KGH[...] = kept_KG1 * total_KGH[...] + summed_KGH

    @pl.when(block == last)
    def _():
        at = rem(start_B[b], size)
        tile = (slice(None), pl.ds(pl.multiple_of(div(at, TILE) * TILE, TILE), TILE), slice(None))
        is_new_1T1 = jax.lax.broadcasted_iota(jnp.int32, (1, TILE, 1), 1) == rem(at, TILE)
        k_tile_KTH[...] = jnp.where(is_new_1T1, new_k_KH[...][:, None], k_KSH[tile])
        v_tile_KTH[...] = jnp.where(is_new_1T1, new_v_KH[...][:, None], v_KSH[tile])
        y_NH[...] = (total_KGH[...] / sum_KG1[...]).reshape(y_NH.shape).astype(y_NH.dtype)
