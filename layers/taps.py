# SPDX-License-Identifier: Apache-2.0
"""Activations by name: record or replace them in a model, without a second model and without other parameters.

A model names an activation by `tap(name, x)`. While a model is traced outside of `record` and `replace`, a tap is `x`,
so the compiled program is the same as without it. Letters: B batch, T query length, D embed, L layers, N query heads,
H head dim.

| name | activation | shape | where |
|---|---|---|---|
| embed | embedded tokens, before dropout | [B, T, D] | models/decoder_lm.py |
| heads | output of each head of attention, before the output projection | [L, B, T, N, H] | layers/attention.py |
| attention | output that attention adds to the residual stream, before dropout | [L, B, T, D] | layers/block.py |
| mlp | output that the MLP or the experts add to the residual stream, before dropout | [L, B, T, D] | layers/block.py |
| block | residual stream after a block | [L, B, T, D] | layers/block.py |

Open a context around one call of the model, inside the function that is jitted, differentiated or scanned:

    def patched(params, clean_D, tokens_BT, positions_BT, segments_BT):
        def patch(x_BTD, layer):
            return jnp.where(layer == 3, x_BTD.at[:, 5].set(clean_D), x_BTD)

        with taps.replace("attention", patch), taps.record("block") as recorded:
            nnx.merge(graph, params)(tokens_BT, positions_BT, segments_BT)
        return recorded["block"]  # [L, B, T, D]

Inside a `jax.shard_map`, as in a training step, `x` is the part of one device.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

NOT_COMPUTED = "layers/taps.py lists the names, and functions that were jitted earlier are not traced again"
Replacement = Callable[[jax.Array, jax.Array | None], jax.Array]  # (activation, number of the layer) -> activation


@dataclasses.dataclass(frozen=True)
class _Scope:
    """What is recorded and replaced while a model is traced, or while the body of one of its layers is.

    `replaced` are the names whose replacements were used. `trace` is the trace that `recorded` belongs to.
    """

    names: tuple[str, ...] = ()
    replacements: tuple[tuple[str, Replacement], ...] = ()
    layer: jax.Array | None = None
    recorded: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    replaced: set[str] = dataclasses.field(default_factory=set)
    trace: object = dataclasses.field(default_factory=get_opaque_trace_state)

    def add(self, name: str, x: jax.Array) -> None:
        """Record an activation; ValueError if there is one of this name."""
        if name in self.recorded:
            raise ValueError(f"taps.record: the model computes {name!r} twice; open one context for each call")
        self.recorded[name] = x

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
    return x


@contextlib.contextmanager
def record(*names: str) -> Iterator[dict[str, jax.Array]]:
    """Record activations; yield a dictionary that has them by name once the model was called.

    Those of layers are stacked, [L, ...]. If an activation is replaced, its replacement is recorded. If contexts are
    nested, the innermost records.

    Raises:
      ValueError: the model has no activation of a name, was not traced, or was called twice.
      RuntimeError: the model was called in a jax transformation that began inside the context.
    """
    scope = dataclasses.replace(_scope.get() or _Scope(), names=names, recorded={})
    with _opened(scope):
        yield scope.recorded
    if missing := set(names) - scope.recorded.keys():
        raise ValueError(f"taps.record: the model computed no activation {sorted(missing)}; {NOT_COMPUTED}")


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
        raise ValueError(f"taps.replace: the model computed no activation {name!r}; {NOT_COMPUTED}")


def layer_numbers(num_layers: int) -> jax.Array | None:
    """Return int32 [L], an argument of the bodies of a stack's layers; None: nothing is recorded or replaced."""
    if (scope := _scope.get()) is None:
        return None
    scope.check_trace("the first layer")
    return jnp.arange(num_layers)


@contextlib.contextmanager
def layer(number: jax.Array | None) -> Iterator[dict[str, jax.Array]]:
    """Record the activations of one layer in a dictionary, which the body of the layer must return.

    `jax.lax.scan` and `jax.checkpoint` trace the body separately, so values leave it only as its results.
    """
    outer = _scope.get()
    if outer is None:
        yield {}
        return
    scope = dataclasses.replace(outer, layer=number, recorded={}, trace=get_opaque_trace_state())
    with _opened(scope):
        yield scope.recorded


def add_layers(recorded: dict[str, jax.Array]) -> None:
    """Record the activations of a stack, [L, ...], which `layer` recorded one by one."""
    for name, x in recorded.items():
        _scope.get().add(name, x)


@contextlib.contextmanager
def _opened(scope: _Scope) -> Iterator[None]:
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)


def _replaced(name: str, x: jax.Array, y: jax.Array) -> jax.Array:
    if (y.shape, y.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"taps.replace: the function for {name!r} returns {y.dtype}{list(y.shape)}; it must return "
            f"{x.dtype}{list(x.shape)}, like its argument"
        )
    return y
