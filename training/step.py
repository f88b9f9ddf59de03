# SPDX-License-Identifier: Apache-2.0
"""One update and one evaluation, as pure functions; they know nothing of the task."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from training.state import TrainState


def make_train_step(
    graph: nnx.GraphDef,
    loss: Callable,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    num_microbatches: int,
    seed: int,
    on_microbatch: Callable | None = None,
) -> Callable:
    """Return train_step(state, batch) -> (state, scalars).

    The gradient is that of (sum of losses) / (sum of weights) over the whole batch, however it is cut into
    microbatches; sums are float32. Scalars are float32 and on device: the objective's, `gradient_norm` before
    clipping, `learning_rate`, and `tokens`, the batch's weight.

    Args:
      graph: the model without its parameters.
      loss: of an objective, (model, carry, batch, key) -> (sum, weight), (carry, scalars).
      seed: of everything random in the loss; each step and microbatch has a key of its own.
      on_microbatch: host function (number of microbatches, index, mean loss), called as each one ends.
    """

    def loss_sum(params, carry, batch, key):
        (total, weight), (carry, scalars) = loss(nnx.merge(graph, params), carry, batch, key)
        return total, (weight, carry, scalars)

    gradient = jax.value_and_grad(loss_sum, has_aux=True)

    def whole(params, carry, batch, key):
        (_, (weight, carry, scalars)), gradients = gradient(params, carry, batch, key)
        return gradients, weight, carry, scalars

    def accumulated(params, carry, batch, key):
        # Microbatch m takes rows m, m + M, ...: every device keeps the rows that it has.
        def split(rows):
            return jnp.swapaxes(rows.reshape(-1, num_microbatches, *rows.shape[1:]), 0, 1)

        def body(sums, microbatch):
            index, (carry, batch) = microbatch
            gradients, weight, carry, scalars = whole(params, carry, batch, jax.random.fold_in(key, index))
            if on_microbatch:
                jax.debug.callback(functools.partial(on_microbatch, num_microbatches), index, mean(scalars["loss"]))
            return jax.tree.map(jnp.add, sums, (gradients, weight, scalars)), carry

        microbatches = (jnp.arange(num_microbatches), jax.tree.map(split, (carry, batch)))
        first = jax.tree.map(lambda x: x[0], microbatches[1])
        shapes = jax.eval_shape(whole, params, *first, key)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes[0], shapes[1], shapes[3]))
        (gradients, weight, scalars), carry = jax.lax.scan(body, zeros, microbatches)
        carry = jax.tree.map(lambda c: jnp.swapaxes(c, 0, 1).reshape(-1, *c.shape[2:]), carry)
        return gradients, weight, carry, scalars

    def train_step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        run = accumulated if num_microbatches > 1 else whole
        gradients, weight, carry, scalars = run(state.params, state.carry, batch, key)
        gradients = jax.tree.map(lambda g: g / jnp.maximum(weight, 1), gradients)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        scalars = jax.tree.map(mean, scalars, is_leaf=lambda x: isinstance(x, tuple)) | {
            "gradient_norm": optax.tree.norm(gradients),
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
            "tokens": weight,
        }
        rows = jax.tree.leaves(batch)[0].shape[0]
        state = TrainState(
            step=state.step + 1,
            examples=state.examples + jnp.uint32(rows),
            params=optax.apply_updates(state.params, updates),
            optimizer=optimizer_state,
            carry=carry,
        )
        return state, scalars

    return train_step


def make_eval_step(graph: nnx.GraphDef, loss: Callable, init_carry: Callable) -> Callable:
    """Return eval_step(params, batch) -> the objective's scalars as (sum, weight) pairs, from a fresh carry."""

    def eval_step(params, batch):
        _, (_, scalars) = loss(nnx.merge(graph, params), init_carry(batch), batch, jax.random.key(0))
        return scalars

    return eval_step


@jax.jit
def is_finite(state: TrainState) -> jax.Array:
    """Return whether every number of a state is finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(state)]))


def mean(pair: tuple) -> jax.Array:
    """Divide a (sum, weight) pair; 0 where nothing has weight."""
    total, weight = pair
    return total / jnp.maximum(weight, 1)


def every(step: int, interval: int) -> bool:
    """Whether something that happens every `interval` steps happens after `step`; never where interval is 0."""
    return interval > 0 and step % interval == 0
