# SPDX-License-Identifier: Apache-2.0
"""Activations by name: record, measure or replace them, without a second model and without other parameters.

A model names an activation by `tap(name, x)`. While a model is traced outside of `record`, `measure` and `replace`, a
tap is `x`, so the compiled program is the same as without it. Letters: B batch, T query length, D embed, F mlp, E
experts, L layers, N query heads, H head dim.

| name | activation | shape | where |
|---|---|---|---|
| embed | embedded tokens, before dropout | [B, T, D] | models/decoder_lm.py |
| heads | output of each head, before the output projection | [L, B, T, N, H] | layers/attention/attention.py |
| attention | output that attention adds to the residual stream, before dropout | [L, B, T, D] | layers/block.py |
| mlp | output that the MLP or the experts add to the residual stream, before dropout | [L, B, T, D] | layers/block.py |
| mlp_hidden | hidden units of the MLP or of the shared experts | [L, B, T, F] | layers/mlp.py |
| expert_hidden | hidden units of each expert for its tokens, `measure` only | [L, E, F] | layers/experts/dispatch.py |
| block | residual stream after a block | [L, B, T, D] | layers/block.py |

Open a context around one call of the model, inside the function that is jitted, differentiated or scanned:

    def patched(params, clean_D, tokens_BT, positions_BT, segments_BT):
        def patch(x_BTD, layer):
            return jnp.where(layer == 3, x_BTD.at[:, 5].set(clean_D), x_BTD)

        with taps.replace("attention", patch), taps.record("block") as recorded:
            nnx.merge(graph, params)(tokens_BT, positions_BT, segments_BT)
        return recorded["block"]  # [L, B, T, D]

Inside a `jax.shard_map`, as in a training step, `x` is the part of one device.

`measure` reduces an activation to a sum over its tokens inside the layer that computes it, so memory does not depend on
the number of tokens, also under rematerialisation.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

Replacement = Callable[[jax.Array, jax.Array | None], jax.Array]  # (activation, number of the layer) -> activation


class NotComputed(ValueError):
    """The model computed no activations of these names, in a context of this function."""

    def __init__(self, function: str, names: list[str]):
        super().__init__(
            f"taps.{function}: the model computed no activation {names}; layers/taps.py lists the names, and functions "
            "that were jitted earlier are not traced again"
        )
        self.names = names


class Measure(NamedTuple):
    """A mean over tokens for each hidden unit.

    Attributes:
      tap: name of the activation.
      function: applied to each entry, in float32.
      axes: names of the dimensions of the mean, such as ("layers", "mlp"), see layers/axes.py. The last are the units.
    """

    tap: str
    function: Callable[[jax.Array], jax.Array]
    axes: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class _Scope:
    """What is recorded and replaced while a model is traced, or while the body of one of its layers is.

    `recorded` has activations by name, and a (sum, weight) pair for each key of `measures`. `replaced` are the names
    whose replacements were used. `trace` is the trace that `recorded` belongs to.
    """

    names: tuple[str, ...] = ()
    measures: Mapping[str, Measure] = dataclasses.field(default_factory=dict)
    replacements: tuple[tuple[str, Replacement], ...] = ()
    layer: jax.Array | None = None
    recorded: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    replaced: set[str] = dataclasses.field(default_factory=set)
    trace: object = dataclasses.field(default_factory=get_opaque_trace_state)

    def add(self, name: str, x: jax.Array | tuple) -> None:
        """Record an activation, or add a measured pair; ValueError if there is an activation of this name."""
        if name in self.measures:
            x = jax.tree.map(jnp.add, self.recorded.pop(name), x) if name in self.recorded else x
        if name in self.recorded:
            raise ValueError(f"taps.record: the model computes {name!r} twice; open one context for each call")
        self.recorded[name] = x

    def measures_of(self, tap: str) -> dict[str, Measure]:
        """Return the measures of an activation by key."""
        found = {key: of_tap for key, of_tap in self.measures.items() if of_tap.tap == tap}
        if found:
            self.check_trace(tap)
        return found

    def check_trace(self, name: str) -> None:
        """Raise RuntimeError in another trace than the scope's, because values of a trace must not leave it."""
        if self.trace != get_opaque_trace_state():
            raise RuntimeError(
                f"taps: {name} is computed in a jax transformation that began after record or replace was opened; "
                "open it inside the function that is jitted, differentiated or scanned"
            )


_scope: contextvars.ContextVar[_Scope | None] = contextvars.ContextVar("taps", default=None)


def tap(name: str, x: jax.Array) -> jax.Array:
    """Return the activation `x` of this name, or its replacement."""
    scope = _scope.get()
    if scope is None:
        return x
    functions = [function for of_name, function in scope.replacements if of_name == name]
    if functions or name in scope.names:
        scope.check_trace(name)
    for function in functions:
        x = _replaced(name, x, function(x, scope.layer))
        scope.replaced.add(name)
    if name in scope.names:
        scope.add(name, x)
    if measures := scope.measures_of(name):
        rows = _rows(x)
        for key, of_tap in measures.items():
            scope.add(key, (of_tap.function(rows).sum(axis=0), jnp.full(1, len(rows), jnp.float32)))
    return x


def tap_groups(name: str, x: jax.Array, groups: jax.Array, num_groups: int) -> None:
    """Measure an activation whose rows belong to groups, such as experts; it is neither recorded nor replaced.

    Args:
      x: [..., F].
      groups: int, of the shape of `x` without F; a number that is not a group's means none.
    """
    scope = _scope.get()
    measures = scope.measures_of(name) if scope else {}
    if not measures:
        return
    is_in_ES = groups.reshape(-1) == jnp.arange(num_groups)[:, None]
    rows = jnp.where(is_in_ES.any(axis=0)[:, None], _rows(x), 0)  # rows of no group may be NaN
    for key, of_tap in measures.items():
        # At the highest precision a TPU does not round the rows to bfloat16.
        sums = jnp.matmul(is_in_ES.astype(jnp.float32), of_tap.function(rows), precision=jax.lax.Precision.HIGHEST)
        scope.add(key, (sums, is_in_ES.sum(axis=1, keepdims=True, dtype=jnp.float32)))


@contextlib.contextmanager
def record(*names: str) -> Iterator[dict[str, jax.Array]]:
    """Record activations; yield a dictionary that has them by name once the model was called.

    Those of layers are stacked, [L, ...]. If an activation is replaced, its replacement is recorded. If contexts are
    nested, the innermost records.

    Raises:
      ValueError: the model has no activation of a name, was not traced, or was called twice.
      RuntimeError: the model was called in a jax transformation that began inside the context.
    """
    scope = dataclasses.replace(_scope.get() or _Scope(), names=names, measures={}, recorded={})
    with _opened(scope):
        yield scope.recorded
    if missing := set(names) - scope.recorded.keys():
        raise NotComputed("record", sorted(missing))


@contextlib.contextmanager
def measure(measures: Mapping[str, Measure]) -> Iterator[dict[str, tuple[jax.Array, jax.Array]]]:
    """Measure activations; yield a dictionary that has (sum, weight) by the keys of `measures` after the model's call.

    The sum is that of `function` over all tokens, padding too, float32 [L, ..., F]. The weight is the number of tokens,
    [L, ..., 1]. An activation that the model computes several times is summed. If contexts are nested, the innermost
    measures or records.

    Raises:
      ValueError, RuntimeError: as `record`.
    """
    scope = dataclasses.replace(_scope.get() or _Scope(), names=(), measures=measures, recorded={})
    with _opened(scope):
        yield scope.recorded
    if missing := {of_tap.tap for key, of_tap in measures.items() if key not in scope.recorded}:
        raise NotComputed("measure", sorted(missing))


@contextlib.contextmanager
def replace(name: str, function: Replacement) -> Iterator[None]:
    """Replace an activation by `function(x, layer)`; nested replacements of a name apply from the outermost on.

    Args:
      function: returns an array of the shape and type of `x`. `layer` is an int32 scalar from 0, also where layers are
        unrolled, so compare it with `jnp.where`, not with `if`. It is None for an activation outside of the layers.

    Raises:
      ValueError: the model has no activation of this name or was not traced, or the replacement has another shape or
        type.
      RuntimeError: the model was called in a jax transformation that began inside the context.
    """
    outer = _scope.get() or _Scope()
    scope = dataclasses.replace(outer, replacements=(*outer.replacements, (name, function)))
    with _opened(scope):
        yield
    if name not in scope.replaced:
        raise NotComputed("replace", [name])


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Leave the activations of a call alone, such as those of a copy of the model with other parameters."""
    with _opened(None):
        yield


def layer_numbers(num_layers: int) -> jax.Array | None:
    """Return int32 [L], an argument of the bodies of a stack's layers; None: nothing is recorded or replaced.

    Pairs that are measured are sums, so a layer may compute its rows in several parts.
    """
    scope = _scope.get()
    if scope is None or not (scope.names or scope.replacements):
        return None
    scope.check_trace("the first layer")
    return jnp.arange(num_layers)


@contextlib.contextmanager
def body(number: jax.Array | None = None) -> Iterator[dict]:
    """Record the activations of a body, such as that of layer `number`, in a dictionary, which the body must return.

    `jax.lax.scan`, `jax.checkpoint` and `jax.shard_map` trace a body separately, so values leave it only as its
    results. Pass them to `add`.
    """
    outer = _scope.get()
    if outer is None:
        yield {}
        return
    scope = dataclasses.replace(outer, layer=number, recorded={}, trace=get_opaque_trace_state())
    with _opened(scope):
        yield scope.recorded


def add(recorded: dict) -> None:
    """Record what `body` recorded; the activations of a stack are [L, ...]."""
    for name, x in recorded.items():
        _scope.get().add(name, x)


@contextlib.contextmanager
def _opened(scope: _Scope | None) -> Iterator[None]:
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)


def _rows(x: jax.Array) -> jax.Array:
    """Return an activation [..., F] as float32 [tokens, F] without gradient."""
    return jax.lax.stop_gradient(x.reshape(-1, x.shape[-1]).astype(jnp.float32))


def _replaced(name: str, x: jax.Array, y: jax.Array) -> jax.Array:
    if (y.shape, y.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"taps.replace: the function for {name!r} returns {y.dtype}{list(y.shape)}; it must return "
            f"{x.dtype}{list(x.shape)}, like its argument"
        )
    return y
