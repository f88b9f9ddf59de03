# SPDX-License-Identifier: Apache-2.0
"""One update and one evaluation as pure functions, independent of the task."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from layers import taps
from parallelism.axis_rules import rules_without
from training import step_transform
from training.offload import on_device
from training.state import TrainState
from training.step_transform import StepChange, StepContext, StepTransform

MEASURED = "measured"  # key of the measured activations among the scalars of a gradient function
OF_A_STEP = ("gradient_norm", "part_square", MEASURED)  # scalars that are not the objective's


class Graphs(NamedTuple):
    """Models without their parameters: the trained one, and frozen ones by role.

    In a tree `frozen`, "base" has the frozen parameters of the trained model, if there are some, and each role those
    of its model.
    """

    trained: nnx.GraphDef
    others: dict[str, nnx.GraphDef]

    def merge(self, params: dict, frozen: dict) -> tuple[nnx.Module, dict[str, nnx.Module]]:
        """Return (the trained model, the frozen models by role)."""
        model = nnx.merge(self.trained, params, *([frozen["base"]] if "base" in frozen else []))
        return model, {role: nnx.merge(graph, frozen[role]) for role, graph in self.others.items()}


def make_gradient(
    graphs: Graphs,
    loss: Callable,
    *,
    num_microbatches: int = 1,
    groups: dict[str, int] | None = None,
    on_microbatch: Callable | None = None,
    part_square: Callable | None = None,
    measures: Mapping[str, taps.Measure] = MappingProxyType({}),
) -> Callable:
    """Return gradient(params, carry, batch, key, frozen) -> (gradients, weight, carry, scalars), sums over the batch.

    Sums over microbatches have the types of the parameters. Microbatches change results only by rounding, unless the
    loss of a token depends on other tokens: `train.balance_loss` and `model.expert_capacity` see one at a time.

    Args:
      graphs: of the models.
      loss: of an objective, see objectives/objective.py.
      groups: {mesh axis: size} of axes that gradients cross once a step. Each group of devices along them accumulates
        its own sum over the microbatches, a full gradient that these axes do not shard.
      on_microbatch: host function (number of microbatches, index, mean loss), called after each microbatch.
      part_square: (gradients, weight) -> a scalar of that name, see training/transforms/noise.py; None: there is none.
      measures: activations to measure; their (sum, weight) pairs are in `scalars[MEASURED]`, by the same keys.
    """

    def loss_sum(params, carry, batch, key, frozen):
        model, others = graphs.merge(params, frozen)
        with taps.measure(measures) as measured:
            returned = loss(model, carry, batch, key, **others)
        _check_loss(returned, carry)
        (total, weight), (carry, scalars) = returned
        return total, (weight, carry, scalars | ({MEASURED: measured} if measures else {}))

    def value_and_gradients(params, carry, batch, key, frozen):
        differentiated = jax.value_and_grad(loss_sum, has_aux=True)
        (_, (weight, carry, scalars)), gradients = differentiated(params, carry, batch, key, frozen)
        if part_square:
            scalars |= {"part_square": part_square(gradients, weight)}
        return gradients, weight, carry, scalars

    def accumulated(params, carry, batch, key, frozen):
        # Microbatch m has rows m, m + M, ..., so no row moves to another device.
        def split(rows):
            return jnp.swapaxes(rows.reshape(-1, num_microbatches, *rows.shape[1:]), 0, 1)

        def body(sums, microbatch):
            index, (carry, batch) = microbatch
            key_of_part = jax.random.fold_in(key, index)
            gradients, weight, carry, scalars = value_and_gradients(params, carry, batch, key_of_part, frozen)
            if on_microbatch:
                jax.debug.callback(functools.partial(on_microbatch, num_microbatches), index, mean(scalars["loss"]))
            return jax.tree.map(jnp.add, sums, (gradients, weight, scalars)), carry

        microbatches = (jnp.arange(num_microbatches), jax.tree.map(split, (carry, batch)))
        first = jax.tree.map(lambda x: x[0], microbatches[1])
        _, weight, _, scalars = jax.eval_shape(value_and_gradients, params, *first, key, frozen)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (weight, scalars))
        # As the parameters, because a reduced gradient may have the type that its weight is used in.
        sums = (jax.tree.map(jnp.zeros_like, params), *zeros)
        (gradients, weight, scalars), carry = jax.lax.scan(body, sums, microbatches)
        carry = jax.tree.map(lambda c: jnp.swapaxes(c, 0, 1).reshape(-1, *c.shape[2:]), carry)
        return gradients, weight, carry, scalars

    def grouped(params, carry, batch, key, frozen):
        axes, num_groups = tuple(groups), math.prod(groups.values())
        keys = jax.random.split(key, num_groups)
        carry, batch = jax.tree.map(lambda rows: rows.reshape(num_groups, -1, *rows.shape[1:]), (carry, batch))
        with nnx.logical_axis_rules(rules_without(axes)):
            in_axes = (None, 0, 0, 0, None)
            of_groups = jax.vmap(accumulated, in_axes=in_axes, spmd_axis_name=axes)
            gradients, weight, carry, scalars = of_groups(params, carry, batch, keys, frozen)
        gradients, weight, scalars = jax.tree.map(lambda x: x.sum(axis=0), (gradients, weight, scalars))
        return gradients, weight, jax.tree.map(lambda c: c.reshape(-1, *c.shape[2:]), carry), scalars

    if num_microbatches == 1:
        return value_and_gradients
    return grouped if groups else accumulated


def make_train_step(
    gradient: Callable,
    optimizer: optax.GradientTransformationExtraArgs,
    transforms: Sequence[StepTransform],
    *,
    seed: int,
    norm: Callable = optax.tree.norm,
    num_parts: int = 0,
    used_rows: Callable = lambda carry: None,
) -> Callable:
    """Return train_step(state, batch, frozen) -> (state, scalars, gradients).

    The gradient is that of (sum of losses) / (sum of weights) over the batch. Scalars are float32 and on device: those
    of the objective and of the transforms, `gradient_norm` before clipping, and `tokens`, the batch's weight unless the
    objective reports its own. If a transform rejects the change, the batch is consumed, and parameters, moments, carry
    and the transforms' memories do not change, except of those that `remembers_rejected`.

    Args:
      gradient: result of `make_gradient`.
      optimizer: its `update` gets `used_rows`, and the loss as `value`, too.
      transforms: see training/step_transform.py.
      seed: of all random draws in the loss; each step and microbatch has its own key.
      norm: function of the gradients; its value is reported and checked for spikes.
      num_parts: number of parts of a batch whose `part_square` the gradient function returns; 0: it returns none.
      used_rows: of an objective, see objectives/objective.py.
    """

    def train_step(state: TrainState, batch: dict, frozen: dict | None = None) -> tuple[TrainState, dict, dict]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        rows = jax.tree.leaves(batch)[0].shape[0]
        gradients, weight, carry, scalars = gradient(state.params, state.carry, batch, key, frozen or {})
        gradients = jax.tree.map(lambda g, p: mean((g.astype(p.dtype), weight)), gradients, state.params)
        batch_square = norm(gradients) ** 2 if num_parts else None
        for transform in transforms:
            gradients = step_transform.changed_gradients(transform, gradients, state)
        scalars = jax.tree.map(mean, scalars, is_leaf=lambda x: isinstance(x, tuple))
        updates, optimizer_state = optimizer.update(
            gradients, state.optimizer, state.params, used_rows=used_rows(carry), value=scalars["loss"]
        )  # fmt: skip
        change = StepChange(optax.apply_updates(state.params, updates), optimizer_state, jnp.bool_(True))
        scalars |= {"gradient_norm": norm(gradients), "tokens": scalars.get("tokens", weight)}
        part_square = scalars.pop("part_square") if num_parts else None
        measured = scalars.pop(MEASURED, {})
        context = StepContext(
            state, batch, gradients, scalars["gradient_norm"], scalars, part_square, batch_square, num_parts, measured
        )  # fmt: skip
        memories = {}
        for transform in transforms:
            memory = state.extra.get(transform.name, {})
            change, memories[transform.name], more = step_transform.updated(transform, context, change, memory)
            if taken := scalars.keys() & more.keys():
                raise ValueError(f"a scalar of {transform.name} and another one are called {min(taken)}; rename one")
            scalars = scalars | more

        def accepted(new, old):
            return jax.tree.map(lambda n, o: jnp.where(change.accepted, n, o), new, old)

        always = {transform.name for transform in transforms if transform.remembers_rejected}
        state = TrainState(
            step=state.step + 1,
            examples=state.examples + jnp.uint32(rows),
            params=accepted(change.params, state.params),
            optimizer=accepted(change.optimizer, state.optimizer),
            carry=accepted(carry, state.carry),
            extra={
                name: memories[name] if name in always else accepted(memories[name], memory)
                for name, memory in state.extra.items()
            },
        )
        return state, scalars, gradients

    return train_step


def make_eval_step(graphs: Graphs, evaluate: Callable) -> Callable:
    """Return eval_step(params, batch, frozen) -> the objective's scalars of held-out rows as (sum, weight) pairs.

    `params` are all parameters of the trained model, and `frozen` those of the models in `graphs.others`.
    """

    def eval_step(params: dict, batch: dict, frozen: dict | None = None) -> dict[str, tuple]:
        others = {role: nnx.merge(graph, frozen[role]) for role, graph in graphs.others.items()}
        scalars = evaluate(nnx.merge(graphs.trained, params), batch, **others)
        _check_scalars("evaluate", scalars, taken=("tokens",))
        for name, pair in scalars.items():
            if not all(map(_is_number, pair)):
                what = f"the scalar {name!r} as {_types(pair)}"
                raise TypeError(f"evaluate of the objective returned {what}; it must be two numbers")
        return scalars

    return eval_step


def _check_loss(returned: object, carry: dict) -> None:
    """Raise TypeError if this is not what `loss` of an objective returns for a carry."""
    match returned:
        case ((total, weight), (next_carry, scalars)) if all(map(_is_number, (total, weight))):
            step_transform.check_like("loss of the objective returned a carry", next_carry, carry)
            _check_scalars("loss", scalars, taken=OF_A_STEP)
        case _:
            raise TypeError(
                f"loss of the objective returned {_types(returned)}; it must return two numbers and two trees, "
                "(sum, weight), (carry, scalars)"
            )


def _check_scalars(method: str, scalars: object, taken: Sequence[str]) -> None:
    """Raise TypeError if this is not {name: (sum, weight)}, with the name "loss" and without those that are `taken`."""
    if not isinstance(scalars, dict) or "loss" not in scalars:
        raise TypeError(f"{method} of the objective returned the scalars {_types(scalars)}; one must be 'loss'")
    if found := [name for name in taken if name in scalars]:
        raise TypeError(f"{method} of the objective returned a scalar {found[0]!r}, as Torus reports one; rename it")
    for name, pair in scalars.items():
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        if not is_pair or not all(isinstance(part, step_transform.NUMBERS) for part in pair):
            raise TypeError(
                f"{method} of the objective returned the scalar {name!r} as {_types(pair)}; it must be a pair, "
                "(sum, weight)"
            )


def _is_number(leaf: object) -> bool:
    return isinstance(leaf, step_transform.NUMBERS) and jnp.shape(leaf) == ()


def _types(tree: object) -> object:
    """Return a tree with the types of its leaves as texts."""
    return jax.tree.map(step_transform.type_text, tree, is_leaf=lambda leaf: leaf is None)


@jax.jit
def is_finite(state: TrainState) -> jax.Array:
    """Return whether every number of a state is finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(on_device(state))]))


def mean(pair: tuple) -> jax.Array:
    """Divide a (sum, weight) pair; return the sum if the weight is 0, as for plain counts."""
    total, weight = pair
    return total / jnp.where(weight > 0, weight, 1)
