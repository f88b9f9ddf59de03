# SPDX-License-Identifier: Apache-2.0
"""Does an activation of a decoder play the part of a variable of a causal model? Interchange interventions.

A base prompt runs with the activation of a source prompt. If the activation is aligned with a variable, the model
answers like the causal model in which the variable has the source's value (arXiv:2106.02997). Without a rotation, the
whole activation is interchanged; with one, its part in a subspace (distributed alignment search, arXiv:2303.02536).

Letters: P pairs of prompts, T positions, D embed, R dimensions of the subspace, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from causality.sites import check_tokens, replicated, run
from layers import taps
from layers.products import with_precision


def labels_after(
    graph: nnx.GraphDef, params: dict, base_PT: np.ndarray, source_PT: np.ndarray, layer: int, position: int,
    labels: tuple[int, ...], rotation_DR: jax.Array | None = None,
) -> np.ndarray:  # fmt: skip
    """Return int [P], the likeliest of `labels` after each base prompt with the source's residual stream at one place.

    Args:
      base_PT, source_PT: int32 [P, T].
      layer, position: where the residual stream after a block is interchanged.
      labels: token ids.
      rotation_DR: float32, orthonormal columns; only the part of the stream in their span is interchanged. None: all.

    Raises:
      ValueError: the model has no such layer or tokens, or the prompts no such position.
    """
    model = nnx.merge(graph, params)
    check_tokens(model, base_PT, source_PT, labels)
    _check_place(model, min(np.shape(base_PT)[1], np.shape(source_PT)[1]), layer, position)
    logits_PV = _interchanged_jit(graph, params, base_PT, source_PT, layer, position, rotation_DR)
    return np.asarray(labels)[np.asarray(logits_PV)[:, np.asarray(labels)].argmax(-1)]


def accuracy(labels_P: np.ndarray, wanted_P: np.ndarray) -> float:
    """Return the interchange-intervention accuracy: how often the causal model's label was given, from 0 to 1."""
    return float((np.asarray(labels_P) == np.asarray(wanted_P)).mean())


def align(
    graph: nnx.GraphDef, params: dict, base_PT: np.ndarray, source_PT: np.ndarray, wanted_P: np.ndarray, layer: int,
    position: int, *, size: int, steps: int, batch: int, key: jax.Array, learning_rate: float = 1e-2,
) -> jax.Array:  # fmt: skip
    """Return float32 [D, R], the orthonormal columns whose interchange gives the wanted tokens most often.

    Distributed alignment search (arXiv:2303.02536, section 3): the rotation minimizes the cross-entropy of the wanted
    tokens by Adam; the model is frozen. A QR decomposition keeps the columns orthonormal.

    Args:
      wanted_P: int32, the token that the causal model wants after the interchange.
      size: R, the dimensions of the subspace.
      steps, batch: of Adam, and the pairs in each, drawn at random.

    Raises:
      ValueError: as in `labels_after`.
    """
    model = nnx.merge(graph, params)
    check_tokens(model, base_PT, source_PT, wanted_P)
    _check_place(model, min(np.shape(base_PT)[1], np.shape(source_PT)[1]), layer, position)
    begin, order = jax.random.split(key)
    free_DR = jax.random.normal(begin, (model.embed_dim, size))
    rows = jax.random.randint(order, (steps, batch), 0, len(base_PT))
    pairs = jnp.asarray(base_PT), jnp.asarray(source_PT), jnp.asarray(wanted_P)
    return _aligned(graph, params, free_DR, rows, pairs, layer, position, learning_rate)


@functools.partial(jax.jit, static_argnums=0)
def _aligned(graph, params, free_DR, rows, pairs, layer, position, learning_rate) -> jax.Array:
    optimizer = optax.adam(learning_rate)

    def loss(free_DR, base_PT, source_PT, wanted_P):
        logits_PV = _interchanged(graph, params, base_PT, source_PT, layer, position, _orthonormal(free_DR))
        return optax.softmax_cross_entropy_with_integer_labels(logits_PV, wanted_P).mean()

    def step(state, rows_P):
        free_DR, moments = state
        gradient = jax.grad(loss)(free_DR, *[array[rows_P] for array in pairs])
        change, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(free_DR, change), moments), None

    (free_DR, _), _ = jax.lax.scan(step, (free_DR, optimizer.init(free_DR)), rows)
    return _orthonormal(free_DR)


def _orthonormal(free_DR: jax.Array) -> jax.Array:
    """Return orthonormal columns with the span of given ones."""
    return with_precision(lambda columns_DR: jnp.linalg.qr(columns_DR)[0], free_DR.dtype)(free_DR)


def _projected(x_PD: jax.Array, rotation_DR: jax.Array) -> jax.Array:
    """Return the part of vectors in the span of orthonormal columns."""
    project = with_precision(lambda x_PD, rotation_DR: (x_PD @ rotation_DR) @ rotation_DR.T, rotation_DR.dtype)
    return project(x_PD, rotation_DR)


def _check_place(model, length: int, layer: int, position: int) -> None:
    """Raise ValueError unless a model has the layer, and prompts of this length the position."""
    if not 0 <= layer < model.num_layers:
        raise ValueError(f"layer={layer} is not one of the model's {model.num_layers}, which begin at 0")
    if not 0 <= position < length:
        raise ValueError(f"position={position} is not one of the {length} of the prompts, which begin at 0")


def _interchanged(graph, params, base_PT, source_PT, layer, position, rotation_DR) -> jax.Array:
    """Return logits [P, V] of the base prompts with the source's residual stream at one place."""
    with taps.record("block") as found:
        run(graph, params, source_PT)
    source_LPTD = found["block"]

    def interchange(x_PTD: jax.Array, number: jax.Array) -> jax.Array:
        change_PD = source_LPTD[number, :, position] - x_PTD[:, position]
        if rotation_DR is not None:
            change_PD = _projected(change_PD, rotation_DR)
        return jnp.where(number == layer, x_PTD.at[:, position].add(change_PD.astype(x_PTD.dtype)), x_PTD)

    with taps.replace("block", interchange):
        return run(graph, params, base_PT)


@functools.partial(jax.jit, static_argnums=0)
def _interchanged_jit(*arguments) -> jax.Array:
    return replicated(_interchanged(*arguments))
