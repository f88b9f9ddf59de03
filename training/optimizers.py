# SPDX-License-Identifier: Apache-2.0
"""Optimizers by name: `optimizer.name = "adamw"` is the function `adamw` here, composed of optax's parts.

Each function returns only the direction of the update. `make` adds the common parts: clipping before it, and after it
decoupled weight decay (arXiv:1711.05101) and the learning rate. To add an optimizer, write a function (config,
weights) -> optax.GradientTransformation, and a test.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Mapping

import jax
import jax.numpy as jnp
import optax

from layers.units import Path, Units

NOT_DECAYED = ("scale", "factor", "bias", "embedding")  # ends of the names of norms, biases and embeddings
STACKED, VOCAB = "layers", "vocab"
TABLE, CONSTANT, BALANCE = "puzzles", "constant", "balance"
EXPERTS = "experts"
# In weights: the width of the stream, or positions that are mixed.
EMBED = ("embed", "expert_embed", "expert_out", "cells")
FIXED = (None, "rank", "router")  # of weights: the dimensions that do not grow with the width
MUON_RMS = 0.2  # of an update's entries, as AdamW's usually have (arXiv:2502.16982, section 2.2)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Facts about the parameters for an optimizer.

    Attributes:
      axes: {path: names of the dimensions}, as layers declare them.
      width_multiplier: the model's width over the width at which the learning rate was tuned; 1 without muP.
      stddevs: {path: standard deviation of the normal distribution that a parameter is drawn from; 0: of no such one}.
      units: the hidden units of the model.
    """

    axes: dict[Path, tuple[str, ...]]
    width_multiplier: float = 1.0
    stddevs: dict[Path, float] = dataclasses.field(default_factory=dict)
    units: tuple[Units, ...] = ()

    def map(self, function: Callable, tree):
        """Return the tree of function(names of the dimensions) at each parameter of a nested dictionary."""
        return jax.tree_util.tree_map_with_path(lambda path, _: function(self.axes[tuple(k.key for k in path)]), tree)


def make(
    direction: optax.GradientTransformation, config, schedule: optax.Schedule, weights: Weights
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer with the update -schedule * (direction of the clipped gradient + weight_decay * weight).

    Puzzle tables use `sparse_sign_sgd` and router biases `router_bias_update` instead. Constants are not updated.
    """
    decayed = is_decayed if config.decayed == "matrices" else None
    parts = [direction, optax.add_decayed_weights(config.weight_decay, decayed)]
    clipping = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    usual = optax.chain(*clipping, *parts, optax.scale_by_learning_rate(schedule))
    if all(is_usual(axes) for axes in weights.axes.values()):
        return optax.with_extra_args_support(usual)
    parts = {
        "usual": usual, TABLE: sparse_sign_sgd(schedule, config), BALANCE: router_bias_update(config.bias_step),
        CONSTANT: optax.set_to_zero(),
    }  # fmt: skip
    labels = functools.partial(weights.map, lambda axes: "usual" if is_usual(axes) else kind(axes))
    return optax.partition(parts, labels)


def sparse_sign_sgd(schedule: optax.Schedule, config) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of a table: sign descent with weight decay on the rows that the batch uses.

    row <- row * (1 - rate * table_weight_decay) - rate * sign(gradient); the rate follows the schedule, from
    `table_learning_rate`. The step passes the indices of the rows as `used_rows`; all others stay bit-identical.
    """
    rate = config.table_learning_rate / config.learning_rate

    def only_used(updates, state, params=None, *, used_rows, **_):
        def of_one(update):
            used = jnp.zeros(update.shape[0], bool).at[used_rows].set(True)
            return jnp.where(used[:, None], update, 0)

        return jax.tree.map(of_one, updates), state

    return optax.chain(
        optax.scale_by_sign(),
        optax.add_decayed_weights(config.table_weight_decay),
        optax.scale_by_learning_rate(lambda step: rate * schedule(step)),
        optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), only_used),
    )


def router_bias_update(step: float) -> optax.GradientTransformation:
    """Return the optimizer of a router's bias: step * sign(mean load - load) (arXiv:2408.15664, algorithm 1).

    Its gradient is load - mean load, see layers/experts/experts.py. The step size is constant.
    """
    # One transformation and not a chain: a chain would have another structure in a checkpoint.
    return optax.stateless(lambda updates, _: jax.tree.map(lambda violation: -step * jnp.sign(violation), updates))


def norm(weights: Weights) -> Callable:
    """Return gradients -> their global norm without router biases, whose "gradients" are load violations."""

    def of_slopes(gradients):
        are_slopes = weights.map(lambda axes: kind(axes) != BALANCE, gradients)
        return optax.tree.norm(jax.tree.map(lambda g, is_slope: g if is_slope else 0.0, gradients, are_slopes))

    return of_slopes


def path_of_weight(path: tuple, weights: Container[Path]) -> Path | None:
    """Return the path of the weight that an array of an optimizer's state belongs to; None if it belongs to none.

    The end of the array's `path`, one of jax.tree_util.tree_map_with_path, is that of the weight. `weights` has the
    paths of all weights.
    """
    keys = tuple(part.key for part in path if isinstance(part, jax.tree_util.DictKey))
    return next((keys[n:] for n in range(len(keys)) if keys[n:] in weights), None)


def reset_moments(state: tuple, masks: Mapping[Path, jax.Array]) -> tuple:
    """Return the state of any optimizer, with zeros for the moments of entries where the masks of weights are true.

    A mask is bool, of the shape of its weight. A moment is an array with the path and the shape of the weight. Second
    moments by row and column (Adafactor) belong to many entries and stay, as do counts of steps.
    """

    def of_leaf(path, leaf):
        mask = masks.get(path_of_weight(path, masks))
        return leaf if mask is None or mask.shape != leaf.shape else jnp.where(mask, jnp.zeros_like(leaf), leaf)

    return jax.tree_util.tree_map_with_path(of_leaf, state)


def is_decayed(params: dict) -> dict:
    """Return for each parameter whether weight decay applies to it."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not path[-1].key.endswith(NOT_DECAYED), params)


def adamw(config, weights: Weights) -> optax.GradientTransformation:
    """Return Adam, for decoupled weight decay (arXiv:1711.05101, algorithm 2)."""
    return optax.chain(_adam(config), scale_by_mup(weights, matrix=1.0, readout=1.0, vocab=0.5, vector=0.0))


def adafactor(config, weights: Weights) -> optax.GradientTransformation:
    """Return Adafactor without momentum (arXiv:1804.04235, algorithm 4): second moments by row and column.

    The learning rate is relative to a weight's root mean square. Each layer of a stack counts as a separate weight.
    Rows and columns are a weight's two longest dimensions, if both have at least 128 entries; else a second moment is
    kept for each entry. So projections to heads narrower than 128 are not factored, and others often head by head.
    """
    one = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms())
    return optax.chain(by_layer(one, weights), scale_by_mup(weights, matrix=0.5, readout=0.5, vocab=0.0, vector=0.0))


def lion(config, weights: Weights) -> optax.GradientTransformation:
    """Return Lion: the sign of an interpolated momentum (arXiv:2302.06675, algorithm 2)."""
    direction = optax.scale_by_lion(config.beta1, config.beta2)
    return optax.chain(direction, scale_by_mup(weights, matrix=1.0, readout=1.0, vocab=0.5, vector=0.0))


def muon(config, weights: Weights) -> optax.GradientTransformation:
    """Return Muon: orthogonalised Nesterov momentum for each "matrix", and Adam for all other parameters; see `kind`.

    So Muon takes the matrices of blocks, a recursive model's learned positions, and heads of few outputs, such as that
    of halting. Of LoRA's pairs it takes the factor with the width of the stream, and Adam the other. Adam also takes
    embeddings, the head over the vocabulary, norms, biases, routers and convolutions. Source: Jordan et al., "Muon: an
    optimizer for hidden layers in neural networks", 2024. Newton-Schulz was made for factors in bfloat16, to which a
    TPU rounds them. The update is scaled so that both parts share one learning rate (arXiv:2502.16982, equation 4).
    """
    orthogonal = optax.contrib.scale_by_muon(
        beta=config.beta1, weight_dimension_numbers=lambda updates: weights.map(matrix_dims, updates)
    )

    def rescale(updates, params):
        def of_one(update, dims):
            fans = [math.prod(update.shape[dim] for dim in side) for side in dims]
            return MUON_RMS * math.sqrt(max(fans)) * update

        return jax.tree.map(of_one, updates, weights.map(matrix_dims, updates))

    parts = {"muon": optax.chain(orthogonal, optax.stateless(rescale)), "adam": _adam(config)}
    labels = functools.partial(weights.map, lambda axes: "muon" if kind(axes) == "matrix" else "adam")
    direction = optax.partition(parts, labels)
    return optax.chain(direction, scale_by_mup(weights, matrix=0.5, readout=1.0, vocab=0.5, vector=0.0))


def adam_atan2(config, weights: Weights) -> optax.GradientTransformation:
    """Return Adam with an arc tangent as quotient: atan2(m, sqrt(v / (1 - beta2^t))) / (1 - beta1^t), without epsilon.

    Source: arXiv:2407.05872, section 5.3. The paper's factors are 1 here. The first moment's bias is corrected outside
    of the arc tangent, as in the package adam-atan2 0.0.3, which trained the Tiny Recursive Model.
    """

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(jnp.int32(0), zeros, jax.tree.map(jnp.copy, zeros))

    def update(gradients, state, params=None):
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(gradients, state.mu, config.beta1, 1)
        nu = optax.tree.update_moment(gradients, state.nu, config.beta2, 2)
        first, second = (1 - beta ** count.astype(jnp.float32) for beta in (config.beta1, config.beta2))
        directions = jax.tree.map(lambda m, v: jnp.atan2(m, jnp.sqrt(v / second)) / first, mu, nu)
        return directions, optax.ScaleByAdamState(count, mu, nu)

    direction = optax.GradientTransformation(init, update)
    return optax.chain(direction, scale_by_mup(weights, matrix=1.0, readout=1.0, vocab=0.5, vector=0.0))


def sgd(config, weights: Weights) -> optax.GradientTransformation:
    """Return the gradient with momentum beta1 (Sutskever et al., 2013, equation 1)."""
    direction = optax.trace(config.beta1)
    return optax.chain(direction, scale_by_mup(weights, matrix=0.0, readout=1.0, vocab=0.0, vector=-1.0))


def _adam(config) -> optax.GradientTransformation:
    """Return Adam's direction (arXiv:1412.6980, algorithm 1)."""
    return optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)


def kind(axes: tuple[str, ...]) -> str:
    """Return "vocab" for embeddings and head, "matrix" for what else has one of EMBED and another dimension.

    Return "vector" for the rest: norms, biases, routers, and factors of LoRA between the rank and heads or the MLP.
    Return TABLE for tables, if a batch uses only some rows; CONSTANT for constants; BALANCE for routers' biases.
    """
    for special in (TABLE, CONSTANT, BALANCE):
        if special in axes:
            return special
    if VOCAB in axes:
        return VOCAB
    return "matrix" if set(EMBED) & set(axes) and len(set(axes) - {STACKED}) > 1 else "vector"


def is_usual(axes: tuple[str, ...]) -> bool:
    """Return whether a parameter is updated, averaged and decayed in the usual way."""
    return kind(axes) not in (TABLE, CONSTANT, BALANCE)


def matrix_dims(axes: tuple[str, ...]) -> optax.contrib.MuonDimensionNumbers:
    """Return Muon's dimensions of a matrix: `embed` is one side; all others, except layers and experts, the other."""
    embed = next(dim for dim, name in enumerate(axes) if name in EMBED)
    others = [dim for dim, name in enumerate(axes) if dim != embed and name not in (STACKED, EXPERTS)]
    return optax.contrib.MuonDimensionNumbers(reduction_axis=(embed,), output_axis=tuple(others))


def mup_role(axes: tuple[str, ...]) -> str:
    """Return which sides of a parameter grow with the width, as muP asks; VOCAB for embeddings and head.

    "matrix": inputs and outputs; "readout": the inputs alone; "vector": the outputs alone, as of norms and biases.
    """
    if VOCAB in axes:
        return VOCAB
    sides = [name for name in axes if name not in (STACKED, EXPERTS, "head_dim")]  # inputs first
    if len(sides) < 2 or sides[0] in FIXED:
        return "vector"
    return "readout" if sides[-1] in FIXED else "matrix"


def scale_by_mup(
    weights: Weights, *, matrix: float, readout: float, vocab: float, vector: float
) -> optax.GradientTransformation:
    """Divide the direction of each parameter by width_multiplier ** exponent, by its `mup_role`: muP's learning rates.

    The exponents follow from arXiv:2203.03466, table 3, for embeddings with entries of variance 1 / width that are
    multiplied by sqrt(width), and logits that are divided by sqrt(width_multiplier). Those of optimizers other than
    Adam follow from the size of the entries of their directions. So an update changes activations as much in a wide
    model as in a narrow one.
    """
    if weights.width_multiplier == 1:
        return optax.identity()
    exponents = {"matrix": matrix, "readout": readout, VOCAB: vocab, "vector": vector}
    factors = {name: weights.width_multiplier**-exponent for name, exponent in exponents.items()}

    def update(updates, params):
        return jax.tree.map(lambda u, factor: factor * u, updates, weights.map(lambda a: factors[mup_role(a)], updates))

    return optax.stateless(update)


def _over_layers(function: Callable) -> Callable:
    """Return a function of trees of stacked weights that applies `function` to each layer; a tree may be empty."""
    mapped = jax.vmap(function)
    return lambda tree, *others: (mapped if jax.tree.leaves(tree) else function)(tree, *others)


def by_layer(inner: optax.GradientTransformation, weights: Weights) -> optax.GradientTransformation:
    """Apply a transformation of full weights separately to each layer of stacked weights."""
    of_stacks = optax.GradientTransformation(*map(_over_layers, inner))
    labels = functools.partial(weights.map, lambda axes: "stack" if STACKED in axes else "one")
    return optax.partition({"stack": of_stacks, "one": inner}, labels)
