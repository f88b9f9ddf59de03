# SPDX-License-Identifier: Apache-2.0
"""The training step: what it minimises, counts and returns, however a batch is cut; and that it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import assembly
from configs import base
from parallelism.mesh import mesh_context
from tests.one_step import gradients_and_scalars
from tests.support import assert_close, packed_batch
from training.state import TrainState
from training.step import every, make_eval_step, make_train_step, mean

ROWS, D = 12, 5


class Line(nnx.Module):
    """A model of one weight; a task as small as a task can be."""

    def __init__(self):
        self.slope = nnx.Param(jnp.arange(1.0, 1 + D))


def squared_error(model, carry, batch, key):
    """An objective with everything that one may have: weights, a carry by row, a scalar of its own, randomness."""
    error = batch["x"] @ model.slope[...] - batch["y"]
    total, weight = jnp.sum(batch["weight"] * error**2), batch["weight"].sum()
    noise = jax.random.normal(key, ())
    scalars = {"loss": (total, weight), "error": (jnp.sum(error), len(error)), "noise": (noise, 1.0)}
    return (total, weight), ({"last": carry["last"] + batch["y"]}, scalars)


def line_batch(weight=None) -> dict:
    rng = np.random.default_rng(0)
    weight = rng.integers(0, 4, ROWS) if weight is None else np.full(ROWS, weight)
    x, y = rng.standard_normal((ROWS, D)), rng.standard_normal(ROWS)
    return jax.tree.map(np.float32, {"x": x, "y": y, "weight": weight})


def line_step(num_microbatches=1, optimizer=None, schedule=lambda step: 0.1 / (1 + step), seed=0, **options):
    """Return (train_step, first state); plain gradient descent unless told."""
    graph, params = nnx.split(Line())
    params, optimizer = nnx.to_pure_dict(params), optimizer or optax.sgd(schedule)
    step = make_train_step(
        graph, squared_error, optimizer, schedule, num_microbatches=num_microbatches, seed=seed, **options
    )
    carry = {"last": jnp.arange(float(ROWS))}
    state = TrainState(jnp.int32(0), jnp.uint32(40), params, optimizer.init(params), carry)
    return jax.jit(step), state


def test_the_gradient_is_that_of_the_weighted_mean():
    step, state = line_step()
    batch, slope = line_batch(), np.asarray(state.params["slope"])
    after, scalars = step(state, batch)
    error = batch["x"] @ slope - batch["y"]
    gradient = 2 * (batch["weight"] * error) @ batch["x"] / batch["weight"].sum()
    assert_close(after.params["slope"], slope - 0.1 * gradient)
    assert_close(scalars["loss"], (batch["weight"] * error**2).sum() / batch["weight"].sum())
    assert_close(scalars["error"], error.mean())
    assert_close(scalars["gradient_norm"], np.linalg.norm(gradient))
    assert scalars["tokens"] == batch["weight"].sum()


@pytest.mark.parametrize("num_microbatches", [2, 3, 12])
def test_microbatches_of_unequal_weight_make_the_step_of_the_whole_batch(num_microbatches):
    whole, state = line_step()
    expected, expected_scalars = whole(state, line_batch())
    actual, scalars = line_step(num_microbatches)[0](state, line_batch())
    del scalars["noise"], expected_scalars["noise"]  # each microbatch draws its own
    assert_close((actual.params, scalars), (expected.params, expected_scalars))
    np.testing.assert_array_equal(actual.carry["last"], expected.carry["last"])  # each row keeps its own


def test_microbatches_make_the_gradients_of_the_whole_batch_in_a_language_model():
    assert_close(gradients_and_scalars(num_microbatches=4), gradients_and_scalars())


def test_microbatches_on_a_mesh_make_the_gradients_of_one_device():
    assert_close(gradients_and_scalars(num_microbatches=2, fsdp=2, context=2, model=2), gradients_and_scalars())


def test_steps_and_examples_are_counted_and_the_schedule_is_followed():
    step, state = line_step()
    for index in range(3):
        state, scalars = step(state, line_batch())
        assert (int(state.step), int(state.examples)) == (index + 1, 40 + ROWS * (index + 1))
        assert float(scalars["learning_rate"]) == np.float32(0.1 / (1 + index))
    assert (state.step.dtype, state.examples.dtype) == (jnp.int32, jnp.uint32)


def test_every_step_and_microbatch_draws_its_own_randomness_again_the_same_from_the_same_seed():
    def noise(num_steps=3, **options):
        step, state = line_step(**options)
        drawn = []
        for _ in range(num_steps):
            state, scalars = step(state, line_batch())
            drawn.append(float(scalars["noise"]))
        return drawn

    first = noise()
    assert len(set(first)) == 3
    assert noise() == first
    assert not set(noise(seed=1)) & set(first)
    # The mean of two normal draws; of one draw taken twice it would be that draw.
    assert not set(noise(num_microbatches=2)) & set(first)


def test_a_batch_without_weight_changes_nothing_and_is_finite():
    step, state = line_step()
    after, scalars = step(state, line_batch(weight=0))
    np.testing.assert_array_equal(after.params["slope"], state.params["slope"])
    assert float(scalars["loss"]) == float(scalars["gradient_norm"]) == 0


def test_progress_is_told_as_each_microbatch_ends():
    told = []
    step, state = line_step(3, on_microbatch=lambda count, index, loss: told.append((count, int(index), float(loss))))
    step(state, line_batch())
    jax.effects_barrier()
    assert sorted(t[:2] for t in told) == [(3, 0), (3, 1), (3, 2)]
    assert len({loss for *_, loss in told}) == 3


def test_evaluation_returns_the_objectives_pairs_and_changes_nothing():
    graph, params = nnx.split(Line())
    batch = line_batch()
    eval_step = jax.jit(make_eval_step(graph, squared_error, lambda batch: {"last": jnp.zeros(ROWS)}))
    scalars = eval_step(nnx.to_pure_dict(params), batch)
    (total, weight), error = scalars["loss"], batch["x"] @ np.arange(1.0, 1 + D) - batch["y"]
    assert_close(total, (batch["weight"] * error**2).sum())
    assert weight == batch["weight"].sum()


def test_mean_of_nothing_is_zero():
    assert mean((0.0, 0.0)) == 0 and mean((6.0, 4.0)) == 1.5


@pytest.mark.parametrize(
    ("interval", "steps"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (3, [3, 6]), (7, [])]
)
def test_every_comes_round_after_each_interval_and_never_for_zero(interval, steps):
    assert [step for step in range(1, 7) if every(step, interval)] == steps


def test_a_tiny_model_learns_four_sequences_by_heart():
    """From the loss of a uniform guess, ln 37 + 1/2 for logits of unit variance, to almost nothing in 150 steps."""
    config = base.get_config()
    config.model.update(
        num_layers=2, embed_dim=48, num_heads=4, num_kv_heads=2, mlp_dim=96, vocab_size=37, max_length=29,
        dtype="float32", layer_loop="scan",
    )  # fmt: skip
    config.mesh.fsdp = 1
    config.train.update(steps=150, global_batch=4, sequence_length=29)
    config.optimizer.update(learning_rate=5e-3, warmup_steps=10)
    run = assembly.assemble(config, devices=jax.devices()[:1])
    batch, losses = jax.device_put(packed_batch([[29]] * 4, 29, 37)), []
    with mesh_context(run.mesh):
        state = run.init()
        for _ in range(150):
            state, scalars = run.train_step(state, batch)
            losses.append(scalars["loss"])
    assert abs(float(losses[0]) - (np.log(37) + 0.5)) < 0.3
    assert float(losses[-1]) < 0.05
