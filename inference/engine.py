# SPDX-License-Identifier: Apache-2.0
"""Decode with a key-value cache: prefill prompts once, fork their rows, extend each row with its own tokens.

    engine = Engine(run.graph, params, length=512)  # in the run's mesh
    logits_BV, cache = engine.prefill(pad_rows([prompt]))  # of the next token
    cache = engine.fork(cache, np.array([0, 0, 0]))
    logits_BTV, cache = engine.extend(cache, pad_rows(continuations))  # after each token of three continuations

Rows have positions of their own, so they may have prompts and continuations of different lengths. Letters: B rows,
T tokens of the longest row in a call, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from configs.errors import ConfigError
from layers.axes import constrain, declared_axes
from layers.block import Stack

CACHE_TYPES = {"model": None, "int8": jnp.int8}  # of keys and values; "model": the compute type
NO_TOKEN = -1  # after the tokens of a shorter row


def decodes(graph: nnx.GraphDef) -> bool:
    """Return whether a model has a cache, which an Engine needs."""
    return "empty_cache" in dir(graph.nodes[0].type)


def pad_rows(rows: Sequence[Sequence[int]], length: int = 0) -> np.ndarray:
    """Return int32 [B, T]: the tokens of each row, then NO_TOKEN up to `length` or the length of the longest row."""
    length = max(length, *map(len, rows))
    return np.array([[*row, *[NO_TOKEN] * (length - len(row))] for row in rows], np.int32)


class Cache(NamedTuple):
    """The rows so far: the model's cache of them, and their numbers of tokens, int32 [B]."""

    of_model: dict
    num_tokens_B: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Engine:
    """A language model that decodes with a cache; needs a mesh in context.

    An engine is a tree whose arrays are its parameters: a jitted function may take it as an argument. Programs are
    compiled once for each graph, length and shape of the tokens; other parameters and tokens need no compilation. No
    method changes a cache, so several calls may extend the same one.

    A row that outgrows the cache has NaN as logits, from that call on. ValueError is raised for more tokens in a call
    than the cache has in all.

    Attributes:
      graph: of a model with the interface of models/decoder_lm.py.
      params: its parameters. A tuple in place of an array [layers, ...] has the arrays of each layer.
      length: of the cache: tokens that a row can have, with the padding of its last call.
      cache_dtype: a key of CACHE_TYPES.
    """

    graph: nnx.GraphDef = dataclasses.field(metadata={"static": True})
    params: dict
    length: int = dataclasses.field(metadata={"static": True})
    cache_dtype: str = dataclasses.field(default="model", metadata={"static": True})

    def separate_layers(self) -> "Engine":
        """Return an engine with a copy of the weights in which each layer has arrays of its own.

        XLA's CPU backend copies the weights of a layer out of the stack in each call, which takes as long as to
        multiply one token with them. Its GPU backend tunes and compiles the products of each slice of a stack.
        """
        if any(map(_is_tuple, jax.tree.leaves(self.params, is_leaf=_is_tuple))):
            return self
        model = self._model()
        names = declared_axes(nnx.state(model, nnx.Param))
        stacks = [part for _, part in nnx.iter_graph(model) if isinstance(part, Stack)]
        if not stacks:
            return self
        for stack in stacks:
            stack.scan = False
        params = flatten_dict(self.params)
        params |= _separated({path: leaf for path, leaf in params.items() if names[path][1][:1] == ("layers",)})
        return dataclasses.replace(self, graph=nnx.graphdef(model), params=unflatten_dict(params))

    @jax.jit
    def prefill(self, tokens_BT: jax.Array) -> tuple[jax.Array, Cache]:
        """Start rows with a prompt each; return (float32 logits [B, V] of the next token, cache).

        Args:
          tokens_BT: int32, at least one token a row, then NO_TOKEN; see `pad_rows`.
        """
        return self.extend_to_last(self.empty(tokens_BT.shape[0]), tokens_BT)

    @jax.jit
    def extend(self, cache: Cache, tokens_BT: jax.Array) -> tuple[jax.Array, Cache]:
        """Append tokens to the rows; return (float32 logits [B, T, V] of the token after each, cache).

        Args:
          tokens_BT: int32, tokens of each row, or none, then NO_TOKEN. Logits at NO_TOKEN mean nothing.
        """
        model = self._model()
        stream_BTD, cache = self._forward(model, cache, tokens_BT)
        return self._logits(model, stream_BTD, cache), cache

    def extend_to_last(self, cache: Cache, tokens_BT: jax.Array) -> tuple[jax.Array, Cache]:
        """Append tokens to the rows; return (float32 logits [B, V] after the last of each, cache), inside a jit.

        Args:
          tokens_BT: as in `extend`. Logits of a row without a token mean nothing.
        """
        model = self._model()
        stream_BTD, cache = self._forward(model, cache, tokens_BT)
        return self._logits(model, _at_last(stream_BTD, tokens_BT), cache)[:, 0], cache

    @jax.jit
    def states(self, tokens_BT: jax.Array) -> jax.Array:
        """Return the normalised states [B, D] after the last token of each row, in the compute type; see `prefill`."""
        stream_BTD, _ = self._forward(self._model(), self.empty(tokens_BT.shape[0]), tokens_BT)
        return _at_last(stream_BTD, tokens_BT)[:, 0]

    def empty(self, num_rows: int) -> Cache:
        """Return a cache of rows without tokens; ConfigError if the model has none."""
        model = self._model()
        if not decodes(self.graph):
            raise ConfigError(
                f"{type(model).__name__} has no empty_cache, so it generates nothing; models/decoder_lm.py says what a "
                "language model needs"
            )
        of_model = model.empty_cache(num_rows, self.length, CACHE_TYPES[self.cache_dtype])
        return Cache(of_model, constrain(jnp.zeros(num_rows, jnp.int32), "batch"))

    def head_size(self) -> int:
        """Return the number of logits; the last of them may be padding of the vocabulary."""
        return jax.eval_shape(lambda engine: engine._model().head_weight(), self).shape[1]

    def shorten(self, cache: Cache, num_tokens_B: jax.Array) -> Cache:
        """Return a cache with only the first tokens of each row, `num_tokens_B` or all if there are fewer."""
        num_tokens_B = jnp.minimum(cache.num_tokens_B, num_tokens_B)
        return Cache(self._model().shorten_cache(cache.of_model, num_tokens_B), num_tokens_B)

    def put(self, cache: Cache, rows_R: jax.Array, part: Cache) -> Cache:
        """Return a cache whose row `rows_R[r]` is row r of `part`; a row number beyond the cache's drops it."""
        of_model = {
            name: jax.tree.map(
                lambda leaf, new, at=(slice(None),) * int(name == "layers"): leaf.at[*at, rows_R].set(new, mode="drop"),
                whole, part.of_model[name],
            )
            for name, whole in cache.of_model.items()
        }  # fmt: skip
        num_tokens_B = cache.num_tokens_B.at[rows_R].set(part.num_tokens_B, mode="drop")
        return Cache(of_model, constrain(num_tokens_B, "batch"))

    @jax.jit
    def fork(self, cache: Cache, rows_B: jax.Array) -> Cache:
        """Return a cache whose row b is row `rows_B[b]` of `cache`; a row may be taken several times, or not at all."""
        of_model = {
            name: jax.tree.map(lambda leaf, dim=int(name == "layers"): jnp.take(leaf, rows_B, axis=dim), part)
            for name, part in cache.of_model.items()
        }
        return Cache(of_model, cache.num_tokens_B[rows_B])

    def _model(self) -> nnx.Module:
        """Return the model. The compiler removes the stacks, as unrolled layers take them apart again."""
        stacked = jax.tree.map(
            lambda leaf: jnp.stack(leaf) if _is_tuple(leaf) else leaf, self.params, is_leaf=_is_tuple
        )
        return nnx.merge(self.graph, stacked)

    def _forward(self, model: nnx.Module, cache: Cache, tokens_BT: jax.Array) -> tuple[jax.Array, Cache]:
        """Return (normalised stream [B, T, D] of new tokens, cache)."""
        if tokens_BT.shape[1] > self.length:
            raise ValueError(
                f"rows of {tokens_BT.shape[1]} tokens do not fit the cache of an Engine of length={self.length}"
            )
        is_token_BT = tokens_BT != NO_TOKEN
        positions_BT = cache.num_tokens_B[:, None] + jnp.arange(tokens_BT.shape[1])
        segments_BT = is_token_BT.astype(jnp.int32)
        stream_BTD, of_model = model(jnp.where(is_token_BT, tokens_BT, 0), positions_BT, segments_BT, cache.of_model)
        fits_B = cache.num_tokens_B + tokens_BT.shape[1] <= self.length
        num_tokens_B = jnp.where(fits_B, cache.num_tokens_B + segments_BT.sum(axis=1), self.length + 1)
        return stream_BTD, Cache(of_model, constrain(num_tokens_B, "batch"))

    def _logits(self, model: nnx.Module, stream_BTD: jax.Array, cache: Cache) -> jax.Array:
        fits_B = cache.num_tokens_B <= self.length
        return jnp.where(fits_B[:, None, None], model.logits(stream_BTD), jnp.nan)


def _at_last(stream_BTD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Return the states [B, 1, D] of the last token of each row."""
    last_B = jnp.maximum(jnp.sum(tokens_BT != NO_TOKEN, axis=1), 1) - 1
    return jnp.take_along_axis(stream_BTD, last_B[:, None, None], axis=1)


def _is_tuple(leaf) -> bool:
    return isinstance(leaf, tuple)


@jax.jit
def _separated(stacked: dict) -> dict:
    return jax.tree.map(tuple, stacked)
