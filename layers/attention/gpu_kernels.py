# SPDX-License-Identifier: Apache-2.0
"""Attention as a GPU kernel: JAX's own in Pallas and Triton, which never holds the scores of a whole sequence.

It computes the same as `attend` of attention.py with the mask of packed documents, block by block
(arXiv:2205.14135, section 3.1). A shard_map states the part of each device, as in kernels.py. Letters: see
attention.py.
"""

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha
from jax.sharding import PartitionSpec

from layers.axes import inside_shard_map, mesh_axes, num_shards

# Triton's products have at least 16 entries; blocks of wider heads do not fit a multiprocessor's own memory.
SMALLEST_HEAD_DIM, LARGEST_HEAD_DIM = 16, 128
# With these blocks and 4 warps it takes half the time of its defaults on an H200 (docs/decisions/layers.md).
BLOCKS = BlockSizes(block_q=128, block_k=64, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64)
BLOCK = BLOCKS.block_q  # the largest of them
HOW = dict(
    causal=True, block_sizes=BLOCKS, backward_pass_impl="triton", num_warps=4, num_stages=2,
    grid=None, interpret=False, debug=False, return_residuals=False,
)  # fmt: skip


def serves(shape: tuple[int, int], *, head_dim: int, dtype, sliding_window: int, score_cap: float) -> bool:
    """Return whether the kernel supports this: full blocks, an unsharded length, 16 bits, neither window nor cap.

    In 32 bits a GPU's matrix units would round the kernel's operands.
    """
    (batch, length), (rows, columns) = shape, map(num_shards, mesh_axes(("batch", "length")))
    full_blocks = batch % rows == 0 and columns == 1 and length % BLOCK == 0
    fits = full_blocks and SMALLEST_HEAD_DIM <= head_dim <= LARGEST_HEAD_DIM
    return fits and dtype.itemsize == 2 and not sliding_window and not score_cap


def attend(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, *, segments_BT: jax.Array, sliding_window: int = 0,
    score_cap: float = 0.0,
) -> jax.Array:  # fmt: skip
    """Compute the same as `attend` of kernels.py, without a window and a cap, which `serves` excludes."""
    assert not sliding_window and not score_cap
    if inside_shard_map():
        return _on_device(q_BTNH, k_BTKH, v_BTKH, segments_BT)
    queries, keys = mesh_axes(("batch", "length", "heads", None)), mesh_axes(("batch", "length", "kv_heads", None))
    specs = queries, keys, keys, PartitionSpec(*queries[:2])
    on_device = jax.shard_map(_on_device, in_specs=specs, out_specs=queries, check_vma=False)
    return on_device(q_BTNH, k_BTKH, v_BTKH, segments_BT)


def _on_device(q_BTNH, k_BTKH, v_BTKH, segments_BT):
    """Return this device's [B, T, N, H]; the kernel takes a query head for each head of keys, so G is mapped over."""
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    of_groups = jax.vmap(_attend, in_axes=(3, None, None, None), out_axes=3)
    return of_groups(q_BTNH.reshape(B, T, K, N // K, H), k_BTKH, v_BTKH, segments_BT).reshape(B, T, N, H)


@jax.custom_vjp
def _attend(q_BTKH, k_BTKH, v_BTKH, segments_BT):
    return _forward(q_BTKH, k_BTKH, v_BTKH, segments_BT)[0]


def _forward(q_BTKH, k_BTKH, v_BTKH, segments_BT):
    """Return (the output, the residuals) of JAX's kernel, named, so that remat can save both."""
    scale = q_BTKH.shape[-1] ** -0.5
    _, (*inputs, y_BTKH, lse_BKT) = mha.fwd(q_BTKH, k_BTKH, v_BTKH, segments_BT, sm_scale=scale, **HOW)
    y_BTKH, lse_BKT = (checkpoint_name(x, "attended") for x in (y_BTKH, lse_BKT))
    return y_BTKH, (*inputs, y_BTKH, lse_BKT)


def _backward(residuals: tuple, dy_BTKH):
    return mha.bwd(sm_scale=dy_BTKH.shape[-1] ** -0.5, **HOW, res=residuals, do=dy_BTKH)


_attend.defvjp(_forward, _backward)
