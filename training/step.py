# SPDX-License-Identifier: Apache-2.0
"""One update and one evaluation as pure functions, independent of the task."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from parallelism.axis_rules import rules_without
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

    The sums are float32. Microbatches change them only by rounding, unless the loss of a token depends on other tokens:
    `train.balance_loss` and `model.expert_capacity` see one microbatch at a time.

    Args:
      graph: the model without its parameters.
      loss: of an objective, (model, carry, batch, key[, teacher]) -> (sum, weight), (carry, scalars).
      groups: {mesh axis: size} of axes that gradients cross once a step. Each group of devices along them accumulates
        its own sum over the microbatches, a full gradient that these axes do not shard.
      on_microbatch: host function (number of microbatches, index, mean loss), called after each microbatch.
      part_square: (gradients, weight) -> a scalar of that name, see training/noise_scale.py; None: there is none.
      adapted: whether `params` are adapters; then the first of `frozen` are the base weights.
      teacher: graph of another model, whose parameters are the last of `frozen`; None: there is none.
    """
    num_own = int(adapted)

    def loss_sum(params, carry, batch, key, *frozen):
        model = nnx.merge(graph, params, *frozen[:num_own])
        (total, weight), (carry, scalars) = loss(model, carry, batch, key, *_merged(teacher, frozen))
        return total, (weight, carry, scalars)

    def value_and_gradients(params, carry, batch, key, *frozen):
        differentiated = jax.value_and_grad(loss_sum, has_aux=True)
        (_, (weight, carry, scalars)), gradients = differentiated(params, carry, batch, key, *frozen)
        if part_square:
            scalars |= {"part_square": part_square(gradients, weight)}
        return gradients, weight, carry, scalars

    def accumulated(params, carry, batch, key, *frozen):
        # Microbatch m has rows m, m + M, ..., so no row moves to another device.
        def split(rows):
            return jnp.swapaxes(rows.reshape(-1, num_microbatches, *rows.shape[1:]), 0, 1)

        def body(sums, microbatch):
            index, (carry, batch) = microbatch
            key_of_part = jax.random.fold_in(key, index)
            gradients, weight, carry, scalars = value_and_gradients(params, carry, batch, key_of_part, *frozen)
            if on_microbatch:
                jax.debug.callback(functools.partial(on_microbatch, num_microbatches), index, mean(scalars["loss"]))
            return jax.tree.map(jnp.add, sums, (gradients, weight, scalars)), carry

        microbatches = (jnp.arange(num_microbatches), jax.tree.map(split, (carry, batch)))
        first = jax.tree.map(lambda x: x[0], microbatches[1])
        shapes = jax.eval_shape(value_and_gradients, params, *first, key, *frozen)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes[0], shapes[1], shapes[3]))
        (gradients, weight, scalars), carry = jax.lax.scan(body, zeros, microbatches)
        carry = jax.tree.map(lambda c: jnp.swapaxes(c, 0, 1).reshape(-1, *c.shape[2:]), carry)
        return gradients, weight, carry, scalars

    def grouped(params, carry, batch, key, *frozen):
        axes, num_groups = tuple(groups), math.prod(groups.values())
        keys = jax.random.split(key, num_groups)
        carry, batch = jax.tree.map(lambda rows: rows.reshape(num_groups, -1, *rows.shape[1:]), (carry, batch))
        with nnx.logical_axis_rules(rules_without(axes)):
            in_axes = (None, 0, 0, 0, *[None] * len(frozen))
            of_groups = jax.vmap(accumulated, in_axes=in_axes, spmd_axis_name=axes)
            gradients, weight, carry, scalars = of_groups(params, carry, batch, keys, *frozen)
        gradients, weight, scalars = jax.tree.map(lambda x: x.sum(axis=0), (gradients, weight, scalars))
        return gradients, weight, jax.tree.map(lambda c: c.reshape(-1, *c.shape[2:]), carry), scalars

    if num_microbatches == 1:
        return value_and_gradients
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

    The gradient is that of (sum of losses) / (sum of weights) over the batch. Scalars are float32 and on device: those
    of the objective, `gradient_norm` before clipping, `learning_rate`, and `tokens`, the batch's weight unless the
    objective reports its own. If the loss or gradient is not finite, or a spike, the update is skipped: parameters,
    average, moments and carry do not change, `skipped` is 1, `skipped_in_a_row` increases, and the batch is consumed.

    Args:
      gradient: result of `make_gradient`.
      optimizer: its `update` gets the new carry too, as `carry`.
      seed: of all random draws in the loss; each step and microbatch has its own key.
      average: (parameters after the update, their average) -> average; None: there is no average.
      spike_deviations: threshold of a spike, see training/guard.py; 0: no finite value is a spike.
      norm: function of the gradients; its value is reported and checked for spikes.
      num_parts: number of parts of a batch whose `part_square` the gradient function returns; with it, the scalar
        `noise_scale`, in rows, is reported.
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

        def accepted(new, old):
            return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)

        noise = state.noise
        if num_parts:
            noise = noise_scale.update(noise, scalars.pop("part_square"), gradient_norm**2, rows, num_parts)
            scalars["noise_scale"] = noise_scale.estimate(noise)
        state = TrainState(
            step=state.step + 1,
            examples=state.examples + jnp.uint32(rows),
            params=accepted(params, state.params),
            average=accepted(averages, state.average),
            optimizer=accepted(optimizer_state, state.optimizer),
            carry=accepted(carry, state.carry),
            guard=memory,
            noise=accepted(noise, state.noise),
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
    """Divide a (sum, weight) pair; return the sum if the weight is less than 1, as for plain counts."""
    total, weight = pair
    return total / jnp.maximum(weight, 1)
