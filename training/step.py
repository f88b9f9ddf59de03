# SPDX-License-Identifier: Apache-2.0
"""One update and one evaluation, as pure functions; they know nothing of the task."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from parallelism.axis_rules import without
from training import guard, noise_scale
from training.offload import on_device
from training.state import TrainState


def make_gradient(
    graph: nnx.GraphDef,
    loss: Callable,
    *,
    num_microbatches: int = 1,
    groups: dict[str, int] | None = None,
    on_microbatch: Callable | None = None,
    part_square: Callable | None = None,
    adapted: bool = False,
    teacher: nnx.GraphDef | None = None,
) -> Callable:
    """Return gradient(params, carry, batch, key, *frozen) -> (gradients, weight, carry, scalars), sums over the batch.

    The sums are float32. Splitting the batch into microbatches changes them by rounding alone, unless the loss of a
    token depends on the other tokens that are computed with it: `train.balance_loss` and `model.expert_capacity` see
    one microbatch at a time.

    Args:
      graph: the model without its parameters.
      loss: of an objective, (model, carry, batch, key[, teacher]) -> (sum, weight), (carry, scalars).
      groups: {mesh axis: size} over which each group of devices keeps a sum of its own until the last microbatch,
        so that gradients cross these axes once a step; it then holds a gradient whole, unsplit by them.
      on_microbatch: host function (number of microbatches, index, mean loss), called as each one ends.
      part_square: (gradients, weight) -> a scalar of that name, see training/noise_scale.py; None: there is none.
      adapted: whether the first of what is frozen, which has no gradient, are the model's other weights, beside which
        `params` are adapters.
      teacher: another model, whose parameters are the last of what is frozen; None: there is none.
    """
    num_own = int(adapted)

    def loss_sum(params, carry, batch, key, *frozen):
        model = nnx.merge(graph, params, *frozen[:num_own])
        (total, weight), (carry, scalars) = loss(model, carry, batch, key, *_merged(teacher, frozen))
        return total, (weight, carry, scalars)

    def whole(params, carry, batch, key, *frozen):
        differentiated = jax.value_and_grad(loss_sum, has_aux=True)
        (_, (weight, carry, scalars)), gradients = differentiated(params, carry, batch, key, *frozen)
        if part_square:
            scalars |= {"part_square": part_square(gradients, weight)}
        return gradients, weight, carry, scalars

    def accumulated(params, carry, batch, key, *frozen):
        # Microbatch m takes rows m, m + M, ...: every device keeps the rows that it has.
        def split(rows):
            return jnp.swapaxes(rows.reshape(-1, num_microbatches, *rows.shape[1:]), 0, 1)

        def body(sums, microbatch):
            index, (carry, batch) = microbatch
            gradients, weight, carry, scalars = whole(params, carry, batch, jax.random.fold_in(key, index), *frozen)
            if on_microbatch:
                jax.debug.callback(functools.partial(on_microbatch, num_microbatches), index, mean(scalars["loss"]))
            return jax.tree.map(jnp.add, sums, (gradients, weight, scalars)), carry

        microbatches = (jnp.arange(num_microbatches), jax.tree.map(split, (carry, batch)))
        first = jax.tree.map(lambda x: x[0], microbatches[1])
        shapes = jax.eval_shape(whole, params, *first, key, *frozen)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes[0], shapes[1], shapes[3]))
        (gradients, weight, scalars), carry = jax.lax.scan(body, zeros, microbatches)
        carry = jax.tree.map(lambda c: jnp.swapaxes(c, 0, 1).reshape(-1, *c.shape[2:]), carry)
        return gradients, weight, carry, scalars

    def grouped(params, carry, batch, key, *frozen):
        axes, num_groups = tuple(groups), math.prod(groups.values())
        keys = jax.random.split(key, num_groups)
        carry, batch = jax.tree.map(lambda rows: rows.reshape(num_groups, -1, *rows.shape[1:]), (carry, batch))
        with nnx.logical_axis_rules(without(axes)):
            in_axes = (None, 0, 0, 0, *[None] * len(frozen))
            of_groups = jax.vmap(accumulated, in_axes=in_axes, spmd_axis_name=axes)
            gradients, weight, carry, scalars = of_groups(params, carry, batch, keys, *frozen)
        gradients, weight, scalars = jax.tree.map(lambda x: x.sum(axis=0), (gradients, weight, scalars))
        return gradients, weight, jax.tree.map(lambda c: c.reshape(-1, *c.shape[2:]), carry), scalars

    if num_microbatches == 1:
        return whole
    return grouped if groups else accumulated


def make_train_step(
    gradient: Callable,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: optax.Schedule,
    *,
    seed: int,
    average: Callable | None = None,
    spike_deviations: float = 0.0,
    norm: Callable = optax.tree.norm,
    num_parts: int = 0,
) -> Callable:
    """Return train_step(state, batch, *frozen) -> (state, scalars, gradients).

    The gradient is that of (sum of losses) / (sum of weights) over the whole batch. Scalars are float32 and on device:
    the objective's, `gradient_norm` before clipping, `learning_rate`, and `tokens`, the batch's weight unless the
    objective counts them itself. An update whose
    loss or gradient is not finite, or a spike, is not taken: parameters, average, moments and carry stay as they were,
    and `skipped` is 1 and `skipped_in_a_row` counts; the batch is used up.

    Args:
      gradient: what `make_gradient` returns.
      optimizer: it is given the new carry too, as `carry`.
      seed: of everything random in the loss; each step and microbatch has a key of its own.
      average: (parameters after the update, their average) -> average; None: none is kept.
      spike_deviations: what a spike is, see training/guard.py; 0: nothing finite is one.
      norm: of gradients, the one that is told and watched.
      num_parts: of a batch, whose `part_square` the gradient gives; the scalar `noise_scale`, in rows, comes of it.
    """

    def train_step(state: TrainState, batch: dict, *frozen) -> tuple[TrainState, dict, dict]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        rows = jax.tree.leaves(batch)[0].shape[0]
        gradients, weight, carry, scalars = gradient(state.params, state.carry, batch, key, *frozen)
        gradients = jax.tree.map(lambda g: g / jnp.maximum(weight, 1), gradients)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params, carry=carry)
        params = optax.apply_updates(state.params, updates)
        averages = average(params, state.average) if average else state.average
        scalars = jax.tree.map(mean, scalars, is_leaf=lambda x: isinstance(x, tuple))
        gradient_norm = norm(gradients)
        good, memory = guard.judge(state.guard, scalars["loss"], gradient_norm, spike_deviations)
        scalars |= {
            "gradient_norm": gradient_norm,
            "learning_rate": jnp.asarray(schedule(state.step - state.guard["skipped"]), jnp.float32),
            "tokens": scalars.get("tokens", weight),
            "skipped": (~good).astype(jnp.float32),
            "skipped_in_a_row": memory["in_a_row"].astype(jnp.float32),
        }

        def taken(new, old):
            return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)

        noise = state.noise
        if num_parts:
            noise = noise_scale.update(noise, scalars.pop("part_square"), gradient_norm**2, rows, num_parts)
            scalars["noise_scale"] = noise_scale.of(noise)
        state = TrainState(
            step=state.step + 1,
            examples=state.examples + jnp.uint32(rows),
            params=taken(params, state.params),
            average=taken(averages, state.average),
            optimizer=taken(optimizer_state, state.optimizer),
            carry=taken(carry, state.carry),
            guard=memory,
            noise=taken(noise, state.noise),
        )
        return state, scalars, gradients

    return train_step


def make_eval_step(graph: nnx.GraphDef, evaluate: Callable, teacher: nnx.GraphDef | None = None) -> Callable:
    """Return eval_step(params, batch, *frozen) -> the objective's scalars of held-out rows as (sum, weight) pairs."""
    return lambda params, batch, *frozen: evaluate(nnx.merge(graph, params), batch, *_merged(teacher, frozen))


def _merged(teacher: nnx.GraphDef | None, frozen: tuple) -> list[nnx.Module]:
    return [] if teacher is None else [nnx.merge(teacher, frozen[-1])]


@jax.jit
def is_finite(state: TrainState) -> jax.Array:
    """Return whether every number of a state is finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(on_device(state))]))


def mean(pair: tuple) -> jax.Array:
    """Divide a (sum, weight) pair; the sum where it weighs less than 1, as what is only counted does."""
    total, weight = pair
    return total / jnp.maximum(weight, 1)


def every(step: int, interval: int) -> bool:
    """Whether something that happens every `interval` steps happens after `step`; never where interval is 0."""
    return interval > 0 and step % interval == 0
