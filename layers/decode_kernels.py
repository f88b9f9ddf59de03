# SPDX-License-Identifier: Apache-2.0
"""Attention of one new token a row over a key-value cache, as a TPU kernel that reads the cache once.

The kernel writes the new key and value into the cache and computes the same as `attend` of layers/attention.py for
T = 1. It goes through the cache in blocks of keys with a running maximum and sum (arXiv:2205.14135, section 3.1). Blocks
in front of a row's first visible key and after its new key are not read. The compiler would write the rows of a cache
one after the other, and it cannot shard a kernel, so a shard_map states the part of each device. Letters: see
layers/attention.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div, rem
from jax.sharding import PartitionSpec

from layers.attention import MASKED, soft_cap
from layers.axes import inside_shard_map, mesh_axes, num_shards

LANES = 128  # heads, and blocks of keys, are multiples of it
TILE = 16  # keys that are written at once, of which one is new
SUBLANES = 8  # the queries that share a head are padded to a multiple of it
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
      cache: of a layer, without scales; see `extend` of layers/attention.py.
      mask_B1S: bool, the keys that each row sees.
    """
    (B, _, N, H), K = q_B1NH.shape, k_B1KH.shape[2]
    start_B = jnp.minimum(cache["start"], mask_B1S.shape[2] - 1)
    on_device = functools.partial(_on_device, score_cap=score_cap, interpret=_interprets())
    if not inside_shard_map():
        heads = mesh_axes(("batch", "kv_heads", None, None))
        rows = PartitionSpec(heads[0])
        on_device = jax.shard_map(
            on_device, in_specs=(heads, heads, heads, heads, heads, rows, rows), out_specs=heads, check_vma=False
        )
    y_BKGH, key, value = on_device(
        q_B1NH.reshape(B, K, N // K, H), k_B1KH.swapaxes(1, 2), v_B1KH.swapaxes(1, 2), cache["key"], cache["value"],
        mask_B1S, start_B,
    )  # fmt: skip
    return y_BKGH.reshape(B, 1, N, H), cache | {"key": key, "value": value}


def write_rows(rows_BS: jax.Array, new_B1: jax.Array, start_B: jax.Array) -> jax.Array:
    """Return the same as `write_rows` of layers/attention.py for one new entry a row, without a loop over rows."""
    S = rows_BS.shape[1]
    return jnp.where(jnp.arange(S) == jnp.minimum(start_B, S - 1)[:, None], new_B1, rows_BS)


def _interprets() -> bool:
    """Return whether the kernel runs as plain XLA; tests replace this."""
    return False


def _on_device(
    q_BKGH, new_k_BK1H, new_v_BK1H, k_BKSH, v_BKSH, mask_B1S, start_B, *, score_cap: float, interpret: bool
):  # fmt: skip
    """Return this device's (attention [B, K, G, H], keys, values)."""
    (B, K, G, H), S = q_BKGH.shape, k_BKSH.shape[2]
    padding, size = -G % SUBLANES, block_size(K, S, H, k_BKSH.dtype.itemsize)
    q_BKGH = jnp.pad(q_BKGH, ((0, 0), (0, 0), (0, padding), (0, 0))).astype(k_BKSH.dtype)
    first_B = jnp.minimum(jnp.argmax(mask_B1S[:, 0], axis=1), start_B) // size
    old_B1S = (mask_B1S & (jnp.arange(S) != start_B[:, None, None])).astype(jnp.int32)

    def block(b, j, first_B, start_B):
        return jnp.minimum(first_B[b] + j, div(start_B[b], size))

    queries = pl.BlockSpec((None, K, G + padding, H), lambda b, j, *_: (b, 0, 0, 0))
    new = pl.BlockSpec((None, K, 1, H), lambda b, j, *_: (b, 0, 0, 0))
    keys = pl.BlockSpec((None, K, size, H), lambda b, j, *at: (b, 0, block(b, j, *at), 0))
    mask = pl.BlockSpec((None, 1, size), lambda b, j, *at: (b, 0, block(b, j, *at)))
    tile = pl.BlockSpec((None, K, TILE, H), lambda b, j, first_B, start_B: (b, 0, div(start_B[b], TILE), 0))
    running = [pltpu.VMEM((K, G + padding, width), jnp.float32) for width in (1, 1, H)]
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_BKGH, k_BKSH, v_BKSH)]
    y_BKGH, *cache = pl.pallas_call(
        functools.partial(_kernel, length=S, score_cap=score_cap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(B, pl.cdiv(S, size)), in_specs=[queries, new, new, mask, keys, keys],
            out_specs=[queries, tile, tile], scratch_shapes=running,
        ),
        out_shape=like, input_output_aliases={6: 1, 7: 2}, interpret=interpret, name=NAME,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * q_BKGH.size * S, transcendentals=q_BKGH.size // H * S, bytes_accessed=k_BKSH.nbytes + v_BKSH.nbytes
        ),
    )(first_B, start_B, q_BKGH, new_k_BK1H, new_v_BK1H, old_B1S, k_BKSH, v_BKSH)  # fmt: skip
    return y_BKGH[:, :, :G], *cache


def block_size(K: int, S: int, H: int, bytes_each: int) -> int:
    """Return the number of keys of a block: a multiple of LANES of up to BLOCK_BYTES, or enough for all."""
    fitting = max(1, BLOCK_BYTES // (K * H * bytes_each * LANES))
    return LANES * min(fitting, pl.cdiv(S, LANES))


def _kernel(
    first_B, start_B, q_KGH, new_k_K1H, new_v_K1H, old_1S, k_KSH, v_KSH, y_KGH, k_tile_KTH, v_tile_KTH,
    max_KG1, sum_KG1, total_KGH, *, length: int, score_cap: float,
):  # fmt: skip
    """Add a block of a row to the running softmax, which begins with the new key; after the last one, write."""
    b, j = pl.program_id(0), pl.program_id(1)
    K, size, H = k_KSH.shape
    block, last = first_B[b] + j, div(start_B[b], size)

    def scores(k_KSH):
        dots_KGS = jnp.einsum("KGH,KSH->KGS", q_KGH[...], k_KSH, preferred_element_type=jnp.float32)
        return soft_cap(dots_KGS * H**-0.5, score_cap)

    @pl.when(j == 0)
    def _():
        max_KG1[...] = scores(new_k_K1H[...])
        sum_KG1[...] = jnp.ones_like(sum_KG1)
        total_KGH[...] = jnp.broadcast_to(new_v_K1H[...].astype(jnp.float32), total_KGH.shape)

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
        summed_KGH = jnp.einsum("KGS,KSH->KGH", weights_KGS.astype(v.dtype), v, preferred_element_type=jnp.float32)
        max_KG1[...] = new_max_KG1
        sum_KG1[...] = kept_KG1 * sum_KG1[...] + weights_KGS.sum(axis=-1, keepdims=True)
        total_KGH[...] = kept_KG1 * total_KGH[...] + summed_KGH

    @pl.when(block == last)
    def _():
        at = rem(start_B[b], size)
        tile = (slice(None), pl.ds(pl.multiple_of(div(at, TILE) * TILE, TILE), TILE), slice(None))
        is_new_1T1 = jax.lax.broadcasted_iota(jnp.int32, (1, TILE, 1), 1) == rem(at, TILE)
        k_tile_KTH[...] = jnp.where(is_new_1T1, new_k_K1H[...], k_KSH[tile])
        v_tile_KTH[...] = jnp.where(is_new_1T1, new_v_K1H[...], v_KSH[tile])
        y_KGH[...] = (total_KGH[...] / sum_KG1[...]).astype(y_KGH.dtype)
