# SPDX-License-Identifier: Apache-2.0
"""Causal grouped-query attention over packed documents: softmax(q k^T / sqrt(H) + mask) v.

Grouped queries: arXiv:2305.13245. Letters: B batch, T query length, S key length, D embed, N query heads,
K key and value heads, G = N / K, H head dim.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from layers.adapters import Projections
from layers.attention.rotary import rotate
from layers.axes import constrain, weight, zeros
from layers.normalization import RMSNorm
from layers.products import add_bias, einsum, einsum_f32, rounded
from layers.sequence_parallel import all_gather_sequence, reduce_scatter_sequence
from layers.taps import tap

MASKED = -1e30  # finite, so that a row with every score masked stays finite


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    """Return cap * tanh(x / cap), or x where cap is 0 (arXiv:2408.00118, section 2)."""
    return cap * jnp.tanh(x / cap) if cap else x


def attention_mask(
    query_segments_BT: jax.Array,
    key_segments_BS: jax.Array,
    query_positions_BT: jax.Array,
    key_positions_BS: jax.Array,
    sliding_window: int = 0,
) -> jax.Array:
    """Return bool [B, T, S]: the same document, not later, and less than `sliding_window` tokens back (0: any)."""
    distance_BTS = query_positions_BT[:, :, None] - key_positions_BS[:, None, :]
    mask_BTS = (query_segments_BT[:, :, None] == key_segments_BS[:, None, :]) & (distance_BTS >= 0)
    return mask_BTS & (distance_BTS < sliding_window) if sliding_window else mask_BTS


def attend(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array | None, *, score_cap: float = 0.0
) -> jax.Array:
    """Return attention [B, T, N, H] in the type of `v`, named "attended"; without a mask all positions see all.

    Scores and softmax are in float32. This is the reference. kernels.py computes the same on a TPU without the
    scores in memory.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores_BKGTS = einsum_f32("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH)
    scores_BKGTS = soft_cap(scores_BKGTS * H**-0.5, score_cap)
    if mask_BTS is not None:
        scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, MASKED)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BSKH.dtype)
    y_BTNH = einsum("BKGTS,BSKH->BTKGH", weights_BKGTS, v_BSKH).reshape(B, T, N, H)
    return checkpoint_name(constrain(y_BTNH, "batch", "length", "heads", "head_dim"), "attended")


class Attention(Projections):
    """The projections of attention, and the norms of queries and keys.

    Args:
      biases: none, qkv (on queries, keys and values, arXiv:2407.10671), or all (on the output too).
      quantization: of the projections, see layers/products.py.
      out_scale: factor on the initial output projection; 1 / sqrt(2 * layers) keeps the residual stream's variance.
      declare: function of layers/axes.py that declares the weights.
      query_scale: factor on queries, in addition to the 1 / sqrt(H) on scores.
      norm_from_one: of the norms of queries and keys, see layers/normalization.py.
    """

    def __init__(
        self, *, embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int, qk_norm: bool, epsilon: float,
        biases: str, quantization: str, out_scale: float, rngs: nnx.Rngs, declare: Callable = weight,
        query_scale: float = 1.0, norm_from_one: bool = False,
    ):  # fmt: skip
        super().__init__(quantization)
        into, out = embed_dim**-0.5, out_scale * (num_heads * head_dim) ** -0.5
        heads, kv_heads = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        self.query = declare(rngs, (embed_dim, num_heads, head_dim), heads, into)
        self.key = declare(rngs, (embed_dim, num_kv_heads, head_dim), kv_heads, into)
        self.value = declare(rngs, (embed_dim, num_kv_heads, head_dim), kv_heads, into)
        self.out = declare(rngs, (num_heads, head_dim, embed_dim), ("heads", "head_dim", "embed"), out)
        on_qkv, on_out = biases != "none", biases == "all"
        self.query_bias = zeros((num_heads, head_dim), heads[1:]) if on_qkv else None
        self.key_bias = zeros((num_kv_heads, head_dim), kv_heads[1:]) if on_qkv else None
        self.value_bias = zeros((num_kv_heads, head_dim), kv_heads[1:]) if on_qkv else None
        self.out_bias = zeros((embed_dim,), ("act_embed",)) if on_out else None
        norm = dict(epsilon=epsilon, axes=("head_dim",), from_one=norm_from_one)
        self.query_norm = RMSNorm(head_dim, **norm) if qk_norm else lambda x: x
        self.key_norm = RMSNorm(head_dim, **norm) if qk_norm else lambda x: x
        self.query_scale = query_scale

    def __call__(self, x_BTD: jax.Array, angles: tuple | None, attend: Callable, cache: dict | None):
        """Return ([B, T, D], cache); queries see the keys and values of the cache and the new ones.

        Args:
          angles: of layers/attention/rotary.py; None: no position encoding.
          attend: queries [B, T, N, H], new keys and values [B, T, K, H], cache to ([B, T, N, H], cache), such as
            `through_cache`. It applies the mask, and names the arrays that its backward pass needs "attended".
        """
        x_BTD = all_gather_sequence(x_BTD)
        q_BTNH = add_bias(self.einsum("BTD,DNH->BTNH", x_BTD, "query"), self.query_bias)
        k_BTKH = add_bias(self.einsum("BTD,DKH->BTKH", x_BTD, "key"), self.key_bias)
        v_BTKH = add_bias(self.einsum("BTD,DKH->BTKH", x_BTD, "value"), self.value_bias)
        q_BTNH = rotate(self.query_norm(q_BTNH), angles)
        q_BTNH = checkpoint_name(q_BTNH if self.query_scale == 1.0 else self.query_scale * q_BTNH, "query")
        k_BTKH = checkpoint_name(rotate(self.key_norm(k_BTKH), angles), "key")
        v_BTKH = checkpoint_name(v_BTKH, "value")
        q_BTNH = constrain(q_BTNH, "batch", "length", "heads", "head_dim")
        y_BTNH, cache = attend(q_BTNH, k_BTKH, v_BTKH, cache)
        y_BTNH = tap("heads", y_BTNH)
        return add_bias(reduce_scatter_sequence(self.einsum("BTNH,NHD->BTD", y_BTNH, "out")), self.out_bias), cache


def through_cache(
    attend: Callable, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, cache: dict | None, **arrays
) -> tuple[jax.Array, dict | None]:
    """Extend the cache by keys and values; return (attention [B, T, N, H] over the whole length, the cache).

    Args:
      attend: queries, keys [B, S, K, H] and values of the whole length, and `arrays`, to [B, T, N, H].
    """
    k_BSKH, v_BSKH, cache = extend(cache, k_BTKH, v_BTKH)
    return attend(q_BTNH, k_BSKH, v_BSKH, **arrays), cache


def extend(cache: dict | None, k_BTKH: jax.Array, v_BTKH: jax.Array) -> tuple[jax.Array, jax.Array, dict | None]:
    """Write keys and values into a layer's cache; return those of the whole length, all-gathered over context.

    Without a cache S == T. A cache is [B, K, S, H]: a head's keys are next to each other, as the products read them.
    """
    if cache is not None:
        cache = _written(_written(cache, "key", k_BTKH), "value", v_BTKH)
        k_BTKH, v_BTKH = _cached(cache, "key", k_BTKH.dtype), _cached(cache, "value", v_BTKH.dtype)
    k_BSKH = constrain(k_BTKH, "batch", "key_length", "kv_heads", "head_dim")
    v_BSKH = constrain(v_BTKH, "batch", "key_length", "kv_heads", "head_dim")
    return k_BSKH, v_BSKH, cache


def _written(cache: dict, name: str, new_BTKH: jax.Array) -> dict:
    """Return a layer's cache with new entries; an int8 cache has a scale for each token and head."""
    new_BKTH = jnp.swapaxes(new_BTKH, 1, 2)
    if (scale := f"{name}_scale") not in cache:
        return cache | {name: write_rows(cache[name], new_BKTH, cache["start"], 2)}
    new = rounded(new_BKTH, jnp.int8, "BKTH", "BKT")
    return cache | {
        name: write_rows(cache[name], new.qvalue, cache["start"], 2),
        scale: write_rows(cache[scale], new.scale, cache["start"], 2),
    }


def _cached(cache: dict, name: str, dtype) -> jax.Array:
    """Return the keys or values [B, S, K, H] of a layer's cache."""
    cached_BKSH = cache[name]
    if f"{name}_scale" in cache:
        cached_BKSH = (cached_BKSH * cache[f"{name}_scale"]).astype(dtype)
    return jnp.swapaxes(cached_BKSH, 1, 2)


def write_rows(rows: jax.Array, new: jax.Array, start_B: jax.Array, dim: int = 1) -> jax.Array:
    """Return `rows` with row b of `new` written from entry `start_B[b]` of a dimension on, earlier if it would not fit.

    Args:
      rows, new: [B, ...]; the same shape but for dimension `dim`, where `new` is not longer.
    """
    return jax.vmap(jax.lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None))(rows, new, start_B, dim - 1)
