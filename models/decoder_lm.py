# SPDX-License-Identifier: Apache-2.0
"""A decoder language model of the Llama family (arXiv:2302.13971, section 2.2).

A model is a module with `make(config.model, *, dtype, scan, kernel, rngs)`, `hidden_units`, and `flops_per_token`,
which takes `frozen` if weights may be frozen, as by adapters. Its blocks name their SUBLAYERS (layers/block.py).

Loss, evaluation and generation, also that of the sample after the last step (`evaluation.sample_tokens`), need these
methods of a language model; causality.prompt needs the activations of layers/taps.py too:

- `forward_with_aux(tokens, positions, segments, cache, key=)`: (normalised stream, cache, router statistics or {});
  `__call__` returns the first two;
- `empty_cache(rows, length, dtype)`: the first cache for `forward_with_aux`, if a sequence comes in parts: a
  dictionary whose entry "layers", if there is one, is a tree of arrays [L, B, ...]; other entries are trees of arrays
  [B, ...]. Layers that are not scanned have arrays of their own, which a program that owns them writes in place.
  A model without it trains, and is evaluated in whole sequences, but generates nothing;
- `shorten_cache(cache, num_tokens)`: the cache with only the first tokens of each row;
- `head_inputs(stream)`: the stream and the all-gathered head [D, V];
- `head_weight()`: the head [D, V], sharded as it is stored;
- `logits(stream)`, and `logit_cap`, their soft cap, 0 for none.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from layers import units
from layers.adapters import Freezable
from layers.attention.attention import Attention, attend, attention_mask, soft_cap, through_cache, write_rows
from layers.attention.rotary import rotary_angles, rotary_frequencies
from layers.axes import constrain
from layers.block import Block, Stack
from layers.dropout import dropout
from layers.embeddings import Embedding, Head
from layers.experts.experts import Experts
from layers.fsdp import all_gather_params, all_gather_reduce_first
from layers.mlp import SwiGLU
from layers.normalization import RMSNorm
from layers.products import einsum_f32, transposed
from layers.sequence_parallel import all_gather_sequence
from layers.taps import tap
from layers.units import Units

# Modules by platform; a run imports only its own, since the compilers of kernels take time to import.
KERNELS = {
    "tpu": "layers.attention.kernels", "gpu": "layers.attention.gpu_kernels", "cpu": "layers.attention.cpu_attention",
}  # fmt: skip
DECODE_KERNELS = {"tpu": "layers.attention.decode_kernels"}  # for one token a row with a cache


def head_dim(config) -> int:
    """Return the width of a head."""
    return config.head_dim or config.embed_dim // config.num_heads


def windows(config) -> list[int]:
    """Return the sliding window of each kind of layer; layer i has kind i modulo the number of kinds. 0: no window.

    Local and global layers alternate: arXiv:2408.00118, section 2.
    """
    if not config.global_every:
        return [config.sliding_window]
    return [config.sliding_window] * (config.global_every - 1) + [0]


def make_block(config, rngs: nnx.Rngs) -> Block:
    """Return one block of the stack."""
    both = dict(embed_dim=config.embed_dim, out_scale=(2 * config.num_layers) ** -0.5, rngs=rngs)
    attention = Attention(
        num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=head_dim(config), qk_norm=config.qk_norm,
        epsilon=config.norm_epsilon, norm_from_one=config.norm_from_one, biases=config.biases,
        query_scale=(head_dim(config) / config.query_scalar) ** 0.5 if config.query_scalar else 1.0,
        quantization=config.quantization, **both,
    )  # fmt: skip
    if config.num_experts:
        mlp = Experts(
            mlp_dim=config.mlp_dim, num_experts=config.num_experts, experts_per_token=config.experts_per_token,
            shared_experts=config.shared_experts, capacity=config.expert_capacity, router=config.router,
            gate_scale=config.gate_scale, **both,
        )  # fmt: skip
    else:
        mlp = SwiGLU(
            mlp_dim=config.mlp_dim, biased=config.biases == "all", activation=config.activation,
            quantization=config.quantization, **both,
        )  # fmt: skip
    norm = functools.partial(RMSNorm, config.embed_dim, epsilon=config.norm_epsilon, from_one=config.norm_from_one)
    return Block(norm, attention, mlp, post_norms=config.post_norms, dropout_rate=config.dropout)


def flops_per_token(config, length: int, *, frozen: bool = False) -> float:
    """Return floating-point operations to train on one token: the forward pass, and twice that for the backward pass.

    There are 6 per weight of a matrix product, or 4 if weights are `frozen` and have no gradient. Each layer adds 12 *
    heads * head dim * visible keys. In causal attention without a window, length / 2 keys are visible on average
    (arXiv:2204.02311, appendix B, counts all keys).
    """
    heads_dim = config.num_heads * head_dim(config)
    kv_dim = config.num_kv_heads * head_dim(config)
    mlps = config.experts_per_token + config.shared_experts if config.num_experts else 1  # that a token goes through
    mlp = 3 * config.mlp_dim * mlps + config.num_experts
    block = config.embed_dim * (2 * heads_dim + 2 * kv_dim + mlp)
    kinds = windows(config)
    keys = sum(_keys_seen(kinds[layer % len(kinds)], length) for layer in range(config.num_layers))
    weights = config.num_layers * block + config.embed_dim * config.vocab_size
    return (4.0 if frozen else 6.0) * weights + 12.0 * heads_dim * keys


def hidden_units(config) -> tuple[Units, ...]:
    """Return the hidden units of the MLPs or of the experts."""
    path = ("stack", "blocks", "mlp")
    if config.num_experts:
        return units.of_experts(path, shared=config.shared_experts > 0)
    return (units.of_mlps(path, biased=config.biases == "all"),)


def logits_by_layer(graph: nnx.GraphDef, params: dict, read: Callable, tokens_BT: jax.Array) -> Iterator[jax.Array]:
    """Yield float32 logits [T, V] for each row of tokens, one document each; needs a mesh in context.

    Memory holds the weights of three layers at most (JAX frees those of a layer somewhat late), or the used rows of the
    embedding, or the head.

    Args:
      graph: of the model without its parameters.
      params: the parameter tree; only its paths are used.
      read: (dotted path, index in the layers or (), which rows, or None) -> float32 array.
      tokens_BT: int [B, T].
    """
    model = nnx.merge(graph, params)
    ones = jnp.ones((1, tokens_BT.shape[1]), jnp.int32)
    contexts, _ = model._contexts(ones, jnp.cumsum(ones, 1) - 1, None)
    used, places = jnp.unique(tokens_BT, return_inverse=True)
    embed = nnx.merge(nnx.graphdef(model.embed), {"embedding": read("embed.embedding", (), used)})
    rows = [embed(row[None], model.dtype) for row in places.reshape(tokens_BT.shape)]
    blocks, paths = nnx.graphdef(model.stack.blocks), flatten_dict(params["stack"]["blocks"])
    apply = jax.jit(lambda weights, x_BTD, context: nnx.merge(blocks, weights)(x_BTD, *context, None)[0])

    def through(layer: int, rows: list) -> list:
        weights = {path: read(".".join(("stack", "blocks", *path)), (layer,), None) for path in paths}
        context = (*contexts[layer % len(contexts)], ones > 0)
        # JAX queues computations, and each keeps its weights until it has run: wait before the next layer is read
        return jax.block_until_ready([apply(unflatten_dict(weights), x_BTD, context) for x_BTD in rows])

    for layer in range(model.num_layers):
        rows = through(layer, rows)
    last = {key: leaf for key, leaf in flatten_dict(params, sep=".").items() if not key.startswith("stack.")}
    read_last = {key: read(key, (), None) for key in last if key != "embed.embedding" or model.tied}
    end = nnx.merge(graph, params | unflatten_dict(read_last, sep="."))
    yield from (end.logits(end.norm(x_BTD))[0] for x_BTD in rows)


def _keys_seen(window: int, length: int) -> float:
    """Return the number of keys that a query sees, on average over a sequence."""
    return window * (1 - window / (2 * length)) if 0 < window < length else length / 2


class DecoderLM(Freezable):
    """Compute embedding, a stack of blocks, a final norm, and a head that is the embedding transposed if tied.

    In muP (arXiv:2203.03466, table 8) of base width D0, the head is multiplied by sqrt(D0 / D) at width D. The paper's
    output layer has a multiplier of 1 / D and entries of variance 1. Ours has entries of variance 1 / D, so a
    multiplier of D^-1/2 and a learning rate smaller by D^-1/2 learn the same function (lemma J.1). The embedding, with
    entries of variance 1 / D times sqrt(D), matches the table's input weight in the same way. Widen a model by adding
    heads; heads of another width would need another scale of the attention scores.

    Args:
      config: the `model` section of a configuration.
      dtype: compute type.
      scan: whether to scan over the layers, see layers/block.py.
      kernel: key of KERNELS, used wherever it supports the shapes; "": none.
    """

    def __init__(self, config, *, dtype, scan: bool, kernel: str = "", rngs: nnx.Rngs):
        self.dtype, self.head_dim, self.windows = dtype, head_dim(config), tuple(windows(config))
        self.rope = config.rope_theta, config.rope_scaling, config.rope_factor, config.rope_original_length
        self.local_rope = (config.local_rope_theta,) if config.local_rope_theta else self.rope
        self.kernel, self.score_cap = kernel, config.attention_soft_cap
        self.logit_cap, self.dropout_rate = config.logit_soft_cap, config.dropout
        self.num_kv_heads, self.num_layers = config.num_kv_heads, config.num_layers
        self.embed = Embedding(
            vocab_size=config.vocab_size, embed_dim=config.embed_dim, rngs=rngs, scale=config.embed_scale
        )
        self.stack = Stack(
            lambda rngs: make_block(config, rngs), num_layers=config.num_layers, scan=scan, remat=config.remat,
            rngs=rngs,
        )  # fmt: skip
        self.norm = RMSNorm(config.embed_dim, epsilon=config.norm_epsilon, from_one=config.norm_from_one)
        if not config.tie_embeddings:
            self.head = Head(vocab_size=config.vocab_size, embed_dim=config.embed_dim, rngs=rngs)
        self.tied, self.embed_dim = config.tie_embeddings, config.embed_dim
        self.head_scale = (config.mup_base_dim / config.embed_dim) ** 0.5 if config.mup_base_dim else 1.0

    def head_weight(self) -> jax.Array:
        """Return the head [D, V], sharded as it is stored."""
        weight = transposed(self.embed.embedding[...]) if self.tied else self.head.kernel[...]
        if self.head_scale == 1.0:
            return weight
        # Rounded as frozen weights are stored, so that these have the same logits.
        return self.head_scale * weight.astype(self.dtype).astype(jnp.float32)

    def head_inputs(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return a normalised stream and the all-gathered head [D, V] that maps it to logits."""
        if self.frozen:
            return x_BTD, all_gather_params(self.head_weight(), ("embed", "vocab"), self.dtype)
        return all_gather_reduce_first(x_BTD, self.head_weight(), ("embed", "vocab"), self.dtype)

    def __call__(
        self, tokens_BT, positions_BT, segments_BT, cache: dict | None = None, *, key: jax.Array | None = None
    ):
        """Return (the normalised stream [B, T, D] in the compute type, the cache); see `forward_with_aux`."""
        return self.forward_with_aux(tokens_BT, positions_BT, segments_BT, cache, key=key)[:2]

    def forward_with_aux(
        self, tokens_BT, positions_BT, segments_BT, cache: dict | None = None, *, key: jax.Array | None = None
    ):
        """Return (the normalised stream [B, T, D] in the compute type, the cache, router statistics).

        The statistics are the argument of `router_losses` in layers/experts/experts.py.

        Args:
          tokens_BT: int [B, T].
          positions_BT: int [B, T], from 0 in each document.
          segments_BT: int [B, T]; a token attends only to its own segment. 0 is padding.
          cache: None, or the result of `empty_cache` or of an earlier call. Each row of it is extended by the row of
            this call. Padding after the last token of a row is overwritten by the next call, but its T tokens must fit.
          key: of the dropout; None: no dropout, as in evaluation and generation.
        """
        contexts, (key_segments_BS, key_positions_BS) = self._contexts(
            all_gather_sequence(segments_BT), all_gather_sequence(positions_BT), cache
        )
        contexts = [(*context, segments_BT > 0) for context in contexts]
        caches = None if cache is None else self._caches_of_layers(cache)
        key = key if self.dropout_rate else None
        x_BTD = tap("embed", self.embed(tokens_BT, self.dtype))
        x_BTD = dropout(x_BTD, self.dropout_rate, key, self.num_layers)
        x_BTD, caches, figures = self.stack(x_BTD, contexts, caches=caches, key=key)
        if cache is not None:
            ends_BT = jnp.where(segments_BT > 0, 1 + jnp.arange(tokens_BT.shape[1]), 0)
            kept = _without_start(caches) if self.stack.scan else [_without_start(of_layer) for of_layer in caches]
            cache = _constrained({
                "layers" if self.stack.scan else "each_layer": kept, "segments": key_segments_BS,
                "positions": key_positions_BS, "start": cache["start"] + ends_BT.max(axis=1),
            })  # fmt: skip
        return self.norm(x_BTD), cache, figures

    def _caches_of_layers(self, cache: dict) -> dict | list[dict]:
        """Return what the stack takes: arrays [L, B, ...] if it scans its layers, else a list of arrays [B, ...]."""
        start_B = cache["start"]
        if self.stack.scan:
            return cache["layers"] | {"start": jnp.broadcast_to(start_B, (self.num_layers, *start_B.shape))}
        return [of_layer | {"start": start_B} for of_layer in cache["each_layer"]]

    def _contexts(self, segments_BT, positions_BT, cache: dict | None) -> tuple[list[tuple], tuple]:
        """Return (the other arguments of each kind of layer, segments and positions [B, S] of the keys)."""
        key_segments_BS, key_positions_BS = segments_BT, positions_BT
        kernel = importlib.import_module(KERNELS[self.kernel]) if self.kernel and cache is None else None
        decodes = None if cache is None else self._decode_kernel(segments_BT.shape[1], cache)
        if cache is not None:
            write = decodes.write_rows if decodes else write_rows
            key_segments_BS = write(cache["segments"], segments_BT, cache["start"])
            key_positions_BS = write(cache["positions"], positions_BT, cache["start"])
        ids = segments_BT, key_segments_BS, positions_BT, key_positions_BS
        attends = {window: self._attend(window, kernel, decodes, ids) for window in dict.fromkeys(self.windows)}
        ropes = {window: self.local_rope if window else self.rope for window in self.windows}
        angles = {
            rope: rotary_angles(positions_BT, *rotary_frequencies(self.head_dim, *rope))
            for rope in dict.fromkeys(ropes.values())
        }
        contexts = [(angles[ropes[window]], attends[window]) for window in self.windows]
        return contexts, (key_segments_BS, key_positions_BS)

    def _decode_kernel(self, num_tokens: int, cache: dict) -> ModuleType | None:
        """Return the kernel that extends each row of this cache by `num_tokens`, None if no kernel does."""
        if num_tokens != 1 or self.kernel not in DECODE_KERNELS:
            return None
        kernel = importlib.import_module(DECODE_KERNELS[self.kernel])
        (rows, length), layer = cache["segments"].shape, cache["layers"] if self.stack.scan else cache["each_layer"][0]
        how = dict(head_dim=self.head_dim, dtype=layer["key"].dtype)
        return kernel if kernel.serves(rows, length, **how) else None

    def _attend(self, window: int, kernel: ModuleType | None, decodes: ModuleType | None, ids: tuple) -> Callable:
        """Return the attention function of a layer with this window, see layers/attention/attention.py: through_cache.

        It is a tree of arrays [B, ...], so that layers can take it as an argument.
        """
        how = dict(sliding_window=window, score_cap=self.score_cap)
        if kernel and kernel.serves(ids[0].shape, head_dim=self.head_dim, dtype=self.dtype, **how):
            attends = functools.partial(through_cache, functools.partial(kernel.attend, **how))
            return jax.tree_util.Partial(attends, segments_BT=ids[0])
        mask_BTS = attention_mask(*ids, window)
        if decodes:
            extend_and_attend = functools.partial(decodes.extend_and_attend, score_cap=self.score_cap)
            return jax.tree_util.Partial(extend_and_attend, mask_B1S=mask_BTS)
        reference = functools.partial(attend, score_cap=self.score_cap)
        return jax.tree_util.Partial(functools.partial(through_cache, reference), mask_BTS=mask_BTS)

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Return float32 [B, T, V] of a normalised stream."""
        logits_BTV = einsum_f32("BTD,DV->BTV", *self.head_inputs(x_BTD))
        return soft_cap(logits_BTV, self.logit_cap)

    def empty_cache(self, batch: int, length: int, dtype=None) -> dict:
        """Return a key-value cache for `length` tokens a row; its segments are 0, so no real token attends to it.

        `start` is the entry of each row that the next call writes first.

        Args:
          dtype: of keys and values; None: the compute type. int8 has a float32 scale for each token and head.
        """
        dtype = dtype or self.dtype
        shape = (batch, self.num_kv_heads, length, self.head_dim)
        if self.stack.scan:
            layers = {"layers": _zeros((self.num_layers, *shape), dtype)}
        else:
            layers = {"each_layer": [_zeros(shape, dtype) for _ in range(self.num_layers)]}
        return _constrained(
            layers
            | {
                "segments": jnp.zeros((batch, length), jnp.int32),
                "positions": jnp.zeros((batch, length), jnp.int32),
                "start": jnp.zeros((batch,), jnp.int32),
            }
        )

    def shorten_cache(self, cache: dict, num_tokens_B: jax.Array) -> dict:
        """Return the cache with only the first tokens of each row; the entries after them are free."""
        kept_BS = jnp.arange(cache["segments"].shape[1]) < num_tokens_B[:, None]
        return cache | {"segments": jnp.where(kept_BS, cache["segments"], 0), "start": num_tokens_B}


def _zeros(shape: tuple, dtype) -> dict:
    """Return empty keys and values."""
    empty = {"key": jnp.zeros(shape, dtype), "value": jnp.zeros(shape, dtype)}
    scales = {f"{name}_scale": jnp.zeros((*shape[:-1], 1)) for name in empty} if dtype == jnp.int8 else {}
    return empty | scales


def _constrained(cache: dict) -> dict:
    """Constrain a cache to be sharded like its rows and the heads of keys and values."""

    def of_leaf(path, leaf):
        layers = ("layers",) if path[0].key == "layers" else ()
        heads = ("kv_heads",) if path[0].key in ("layers", "each_layer") else ()
        axes = (*layers, "batch", *heads)
        return constrain(leaf, *axes, *[None] * (leaf.ndim - len(axes)))

    return jax.tree_util.tree_map_with_path(of_leaf, cache)


def _without_start(of_layer: dict) -> dict:
    return {name: leaf for name, leaf in of_layer.items() if name != "start"}


make = DecoderLM  # call it with a mesh in context
