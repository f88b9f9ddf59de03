# SPDX-License-Identifier: Apache-2.0
"""Attention as a TPU kernel: JAX's splash attention, which never holds the scores of a whole sequence.

The kernel computes the same as `attend` of attention.py with the mask of packed documents. It works block by
block in a chip's own memory (arXiv:2205.14135, section 3.1) and skips blocks that are fully masked. The compiler cannot
shard a kernel, so a shard_map states the part of each device. Letters: see attention.py.
"""

import math
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import NamedSharding, PartitionSpec

from layers.axes import inside_shard_map, mesh_axes, num_shards
from layers.products import with_precision

LANES = 128  # blocks are multiples of it
DQ_PARTS = 4  # the fused backward kernel writes dq once for every block of keys; it is not used for more blocks


def serves(shape: tuple[int, int], **_) -> bool:
    """Return whether the kernel supports [batch, length]: each device's part of the length must be full blocks.

    Head dim, type, window and cap are not restricted; gpu_kernels.py restricts them.
    """
    (batch, length), (rows, columns) = shape, map(num_shards, mesh_axes(("batch", "length")))
    return batch % rows == 0 and length % (LANES * columns) == 0


def attend(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, *, segments_BT: jax.Array, sliding_window: int = 0,
    score_cap: float = 0.0,
) -> jax.Array:  # fmt: skip
    """Return attention [B, T, N, H] in the type of `v`, named "attended"; scores and softmax in float32; T == S.

    A query sees the keys of its segment at its index or before, at most `sliding_window` of them (0: any number). If
    positions increase by 1 within a segment, this equals `attention_mask`. Padding, segment 0, sees only the padding
    before it.

    Args:
      segments_BT: int32 [B, T].
    """
    queries, keys = mesh_axes(("batch", "length", "heads", None)), mesh_axes(("batch", "key_length", "kv_heads", None))
    kernel = _kernel(q_BTNH, queries[1], sliding_window, score_cap)
    scale, on_device = q_BTNH.shape[-1] ** -0.5, _on_device
    if not inside_shard_map():
        across = PartitionSpec(None, queries[1])  # heads share a mask
        specs = (
            kernel.manual_sharding_spec(NamedSharding(jax.sharding.get_abstract_mesh(), across)),
            queries, keys, keys, PartitionSpec(*queries[:2]), PartitionSpec(*keys[:2]),
        )  # fmt: skip
        on_device = jax.shard_map(_on_device, in_specs=specs, out_specs=queries, check_vma=False)
    return on_device(kernel, scale * q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BT).astype(v_BSKH.dtype)


def _on_device(kernel: Callable, q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BS):
    """Return this device's [B, T, N, H]; the kernel takes one sequence, heads first."""
    named = {"query": q_BTNH, "key": k_BSKH, "value": v_BSKH}  # named again, so that remat saves the kernel's layout
    q_BNTH, k_BKSH, v_BKSH = (checkpoint_name(x.swapaxes(1, 2), name) for name, x in named.items())
    attention = with_precision(jax.vmap(kernel), v_BSKH.dtype)
    y_BNTH = attention(q_BNTH, k_BKSH, v_BKSH, splash.SegmentIds(segments_BT, segments_BS))
    return y_BNTH.swapaxes(1, 2)


def _kernel(q_BTNH: jax.Array, length_axes, sliding_window: int, score_cap: float) -> Callable:
    """Return the kernel for any number of heads; its arrays tell which blocks a device skips."""
    _, length, _, head_dim = q_BTNH.shape
    shape, shards = (length, length), num_shards(length_axes)
    mask = splash.LocalMask(shape, (sliding_window - 1, 0), 0) if sliding_window else splash.CausalMask(shape)
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask]),
        block_sizes=_block_sizes(length // shards, length, head_dim, q_BTNH.dtype.itemsize),
        attn_logits_soft_cap=score_cap or None,
        head_shards=1,
        q_seq_shards=shards,
        residual_checkpoint_name="attended",  # the output and the other residuals of its backward pass
    )


def _block_sizes(queries: int, keys: int, head_dim: int, bytes_each: int) -> splash.BlockSizes:
    """Return blocks that divide a device's number of queries and keys and fit 16 MiB of a chip's own memory.

    The sizes for heads of up to 128 numbers in bfloat16 are the fastest found for a 7B model on v4.
    """
    wide = math.ceil(head_dim / LANES) * bytes_each // 2
    q, kv, kv_dkv = _block(queries, 512 // wide), _block(keys, 1024 // wide), _block(keys, 2048 // wide)
    fused = keys // kv_dkv <= DQ_PARTS
    return splash.BlockSizes(
        block_q=q, block_kv=kv, block_kv_compute=_block(kv, 512),
        block_q_dkv=q, block_kv_dkv=kv_dkv, block_kv_dkv_compute=_block(kv_dkv, 512),
        block_q_dq=None if fused else q, block_kv_dq=None if fused else kv, use_fused_bwd_kernel=fused,
    )  # fmt: skip


def _block(length: int, limit: int) -> int:
    """Return the largest multiple of LANES up to the limit that divides the length."""
    return max(size for size in range(LANES, max(limit, LANES) + 1, LANES) if length % size == 0)
