# SPDX-License-Identifier: Apache-2.0
"""The training step: what it minimises, counts and returns, however a batch is cut; and that it learns."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from configs import base
from core import assembly
from layers import fsdp
from parallelism.mesh import make_mesh, mesh_context
from reporting.step_log import every
from tests.one_step import gradients_and_scalars, small_config
from tests.support import assert_close, packed_batch
from training.optimizers import Weights
from training.state import TrainState
from training.step import Graphs, make_eval_step, make_gradient, make_train_step, mean
from training.step_transform import StepTransform
from training.transforms.average import Average
from training.transforms.guard import Guard

ROWS, D = 12, 5


class Line(nnx.Module):
    """A model of one weight; a task as small as a task can be."""

    def __init__(self):
        self.slope = nnx.Param(jnp.arange(1.0, 1 + D))


def squared_error(model, carry, batch, key):
    """An objective with everything that one may have: weights, a carry by row, a scalar of its own, randomness."""
    error = batch["x"] @ model.slope[...] - batch["y"]
    total, weight = jnp.sum(batch["weight"] * error**2), batch["weight"].sum()
    noise = jax.random.normal(key, ()) if key is not None else 0.0
    scalars = {"loss": (total, weight), "error": (jnp.sum(error), len(error)), "noise": (noise, 1.0)}
    return (total, weight), ({"last": carry["last"] + batch["y"]}, scalars)


def line_batch(weight=None) -> dict:
    rng = np.random.default_rng(0)
    weight = rng.integers(0, 4, ROWS) if weight is None else np.full(ROWS, weight)
    x, y = rng.standard_normal((ROWS, D)), rng.standard_normal(ROWS)
    return jax.tree.map(np.float32, {"x": x, "y": y, "weight": weight})


def line_step(
    num_microbatches=1, optimizer=None, schedule=lambda step: 0.1 / (1 + step), seed=0, ema_decay=0.0, transforms=(),
    loss=squared_error, **options,
):  # fmt: skip
    """Return (train_step, first state), by default of plain gradient descent."""
    graph, params = nnx.split(Line())
    params, optimizer = nnx.to_pure_dict(params), optimizer or optax.sgd(schedule)
    gradient = make_gradient(Graphs(graph, {}), loss, num_microbatches=num_microbatches, **options)

    optimizer = optax.with_extra_args_support(optimizer)
    average = [Average(Weights({("slope",): ("embed",)}), ema_decay)] if ema_decay else []
    transforms = [*average, *transforms, Guard(schedule)]
    step = make_train_step(gradient, optimizer, transforms, seed=seed)
    carry = {"last": jnp.arange(float(ROWS))}
    extra = {transform.name: transform.init(params) for transform in transforms}
    state = TrainState(jnp.int32(0), jnp.uint32(40), params, optimizer.init(params), carry, extra)
    return jax.jit(step), state


NUMBER = jnp.float32(1)
PAIR = (NUMBER, NUMBER)
OF_ONES = {"last": jnp.ones(ROWS)}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "loss of the objective returned nothing; it must return two numbers and two trees"),
        ("loss", "loss of the objective returned str; it must return two numbers"),
        (((None, NUMBER), (OF_ONES, {"loss": PAIR})), "loss of the objective returned .*nothing.* two numbers"),
        ((PAIR, (OF_ONES, {"loss": ("x", NUMBER)})), "returned the scalar 'loss' as .*str.* a pair"),
        (NUMBER, r"loss of the objective returned float32\[\]; it must return two numbers"),
        ((PAIR, {}), "loss of the objective returned .* it must return two numbers and two trees"),
        (((jnp.ones(2), NUMBER), (OF_ONES, {"loss": PAIR})), "loss of the objective returned .* two numbers"),
        ((PAIR, (OF_ONES, {"mine": PAIR})), "loss of the objective returned the scalars .* one must be 'loss'"),
        ((PAIR, (OF_ONES, {"loss": PAIR, "gradient_norm": PAIR})), "returned a scalar 'gradient_norm', as Torus"),
        ((PAIR, (OF_ONES, {"loss": PAIR, "measured": PAIR})), "returned a scalar 'measured', as Torus reports one"),
        ((PAIR, (OF_ONES, {"loss": NUMBER})), "loss of the objective returned the scalar 'loss' as .* a pair"),
        ((PAIR, ({}, {"loss": PAIR})), r"returned a carry: last is nothing, where float32\[12\] is expected"),
        ((PAIR, ({"last": NUMBER}, {"loss": PAIR})), r"returned a carry: last is float32\[\], where float32\[12\]"),
    ],
    ids=str,
)
def test_what_a_loss_may_not_return_is_named(returned, message):
    graph, params = nnx.split(Line())
    gradient = make_gradient(Graphs(graph, {}), lambda *_: returned)
    with pytest.raises(TypeError, match=message):
        gradient(nnx.to_pure_dict(params), OF_ONES, line_batch(), None, {})


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        (None, "returned the scalar.*must be"),
        ({"mine": PAIR}, "returned the scalar.*must be"),
        ({"loss": NUMBER}, "returned the scalar.*must be"),
        ({"loss": [NUMBER, NUMBER]}, "returned the scalar.*must be"),
        ({"loss": PAIR, "tokens": PAIR}, "returned a scalar 'tokens', as Torus reports one; rename it"),
        ({"loss": PAIR, "of_classes": (jnp.ones(3), jnp.ones(3))}, "scalar 'of_classes' as .*; it must be two numbers"),
    ],
    ids=str,
)
def test_what_evaluate_may_not_return_is_named(scalars, message):
    graph, params = nnx.split(Line())
    with pytest.raises(TypeError, match=f"^evaluate of the objective .*{message}"):
        make_eval_step(Graphs(graph, {}), lambda *_: scalars)(params, {})


@pytest.mark.parametrize(
    ("gradients", "update", "message"),
    [
        (None, None, "change_gradients of step transform mine returned: slope is nothing, where float32"),
        ({"slope": NUMBER}, None, "change_gradients .* returned: slope is float32.* is expected"),
        (..., lambda change, memory: change, "update of step transform mine returned StepChange; it must return"),
        (..., lambda change, memory: (change, {}, {}), "memory unlike that of init: count is nothing, where int32"),
        (..., lambda change, memory: (change, {"count": NUMBER}, {}), "count is float32.*, where int32"),
        (..., lambda change, memory: (change, {**memory, "x": NUMBER}, {}), "x is float32.*, where nothing"),
        (..., lambda change, memory: (change._replace(params={}), memory, {}), "a StepChange: params.slope is nothing"),
        (..., lambda change, memory: (change, memory, {"x": PAIR}), "the scalar 'x' as tuple; it must be a number"),
        (..., lambda change, memory: (change, memory, {"x": jnp.ones(3)}), r"scalar 'x' as an array \[3\]; it must be"),
    ],
)  # fmt: skip
def test_what_a_step_transform_may_not_return_is_named(gradients, update, message):
    class Mine(StepTransform):
        name = "mine"

        def init(self, params):
            return {"count": jnp.int32(0)}

        def change_gradients(self, found, state):
            return found if gradients is ... else gradients

        def update(self, context, change, memory):
            return update(change, memory)

    step, state = line_step(transforms=[Mine()])
    with pytest.raises(TypeError, match=message):
        step(state, line_batch())


@pytest.mark.parametrize("share", [1.0, 0.01])
def test_weights_of_an_objective_may_be_fractions(share):
    """Only their proportions count: the gradient, the loss and the noise scale are those of whole weights."""

    def of_share(*arguments, **named):
        (total, weight), (carry, scalars) = squared_error(*arguments, **named)
        shared = {name: (share * of, share * by) for name, (of, by) in scalars.items()}
        return (share * total, share * weight), (carry, shared)

    (step, state), (shared_step, _) = line_step(ema_decay=0.9), line_step(ema_decay=0.9, loss=of_share)
    whole, shared = (jax.device_get(one(state, line_batch())[:2]) for one in (step, shared_step))
    assert whole[1].pop("tokens") * share == pytest.approx(shared[1].pop("tokens"))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), whole, shared)


def test_a_step_transform_may_return_numbers_and_narrower_types():
    """What it returns is stored in the types of its memory."""

    class Mine(StepTransform):
        name = "mine"

        def init(self, params):
            return {"count": jnp.uint32(7), "mean": jnp.ones(3, jnp.bfloat16)}

        def update(self, context, change, memory):
            return change._replace(accepted=True), {"count": 0, "mean": jnp.full(3, 0.5)}, {"mine": 2.0}

    step, state = line_step(transforms=[Mine()])
    after, scalars, _ = step(state, line_batch())
    assert_close(after.extra["mine"], {"count": np.uint32(0), "mean": np.full(3, 0.5, jnp.bfloat16)})
    assert [leaf.dtype for leaf in jax.tree.leaves(after.extra["mine"])] == [jnp.uint32, jnp.bfloat16]
    assert scalars["mine"] == 2


def test_the_gradient_is_that_of_the_weighted_mean():
    step, state = line_step()
    batch, slope = line_batch(), np.asarray(state.params["slope"])
    after, scalars, gradients = step(state, batch)
    error = batch["x"] @ slope - batch["y"]
    gradient = 2 * (batch["weight"] * error) @ batch["x"] / batch["weight"].sum()
    assert_close(gradients["slope"], gradient)
    assert_close(after.params["slope"], slope - 0.1 * gradient)
    assert_close(scalars["loss"], (batch["weight"] * error**2).sum() / batch["weight"].sum())
    assert_close(scalars["error"], error.mean())
    assert_close(scalars["gradient_norm"], np.linalg.norm(gradient))
    assert scalars["tokens"] == batch["weight"].sum()


@pytest.mark.parametrize("num_microbatches", [2, 3, 12])
def test_microbatches_of_unequal_weight_make_the_step_of_the_whole_batch(num_microbatches):
    whole, state = line_step()
    expected, expected_scalars, _ = whole(state, line_batch())
    actual, scalars, _ = line_step(num_microbatches)[0](state, line_batch())
    del scalars["noise"], expected_scalars["noise"]  # each microbatch draws its own
    assert_close((actual.params, scalars), (expected.params, expected_scalars))
    np.testing.assert_array_equal(actual.carry["last"], expected.carry["last"])  # each row keeps its own


@pytest.mark.parametrize(
    "mesh",
    [{"fsdp": 2, "context": 2, "model": 2}, {"data": 2, "expert": 2}],
    ids=lambda mesh: "-".join(mesh),
)
def test_microbatches_make_the_gradients_of_the_whole_batch_in_a_language_model(mesh):
    """Each holds another number of real tokens, on each device too."""
    assert_close(gradients_and_scalars(num_microbatches=4, **mesh), gradients_and_scalars())


@pytest.mark.parametrize(
    "mesh", [pytest.param({"fsdp": 8}, marks=pytest.mark.slow), {"data": 2, "fsdp": 4}], ids=lambda mesh: "-".join(mesh)
)
def test_a_whole_step_with_the_rings_of_a_tpu_has_the_same_bits(mesh, monkeypatch):
    """Else every other test here, which runs on CPU devices, would say nothing about the rings."""
    exchanged = gradients_and_scalars(**mesh)
    monkeypatch.setattr(fsdp, "platform", lambda: "tpu")
    with_rings = gradients_and_scalars.__wrapped__(**mesh)  # not from its cache
    jax.tree.map(np.testing.assert_array_equal, exchanged, with_rings)


COLLECTIVE = re.compile(r"= (.*?) (all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
CALLED = re.compile(r"(?:body|calls|to_apply)=%([\w.-]+)")


def summed_numbers(hlo: str) -> tuple[int, int]:
    """Return how many float32 numbers the collectives of a compiled program sum (outside its loops, inside them)."""
    texts = re.split(r"\n(?=%|ENTRY)", hlo)
    computations = {re.match(r"(?:ENTRY )?%([\w.-]+)", text)[1]: text for text in texts if text[0] in "%E"}
    looped, found = set(), re.findall(r"body=%([\w.-]+)", hlo)
    while found:
        looped.update(found)
        found = [name for body in found for name in CALLED.findall(computations[body]) if name not in looped]
    numbers = [0, 0]
    for name, text in computations.items():
        for collective in COLLECTIVE.finditer(text):
            shapes = re.findall(r"f32\[([\d,]+)\]", collective[1])
            shapes = shapes[1:] if collective[2] == "all-to-all" else shapes  # the part that a device keeps
            numbers[name in looped] += sum(math.prod(map(int, dims.split(","))) for dims in shapes)
    return tuple(numbers)


def gradient_collectives(num_microbatches: int, **mesh) -> tuple[int, tuple[int, int]]:
    """Return (parameters, `summed_numbers`) of a training step whose only loop is that over microbatches."""
    config = small_config(**mesh)
    config.train.update(gradient_accumulation=num_microbatches, global_batch=8 * 8, loss_chunk_tokens=0)
    config.model.update(layer_loop="unroll", num_layers=1)
    config.optimizer.update(name="sgd", clip_norm=0.0)
    run = assembly.assemble(config)
    with mesh_context(run.mesh):
        hlo = run.train_step.lower(run.abstract_state, run.abstract_batch).compile().as_text()
    return run.models.num_parameters, summed_numbers(hlo)


def test_what_is_summed_in_a_loop_is_told_from_what_is_summed_once():
    """The instrument itself, on a program with one of each."""

    @functools.partial(jax.shard_map, in_specs=P(), out_specs=P(), check_vma=False)
    def program(x):
        looped = jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(jax.lax.psum(y, "data")), x[:7])
        return jax.lax.psum(x, "data") * looped.sum()

    with mesh_context(make_mesh({"data": 8})):
        assert summed_numbers(jax.jit(program).lower(jnp.ones(11)).compile().as_text()) == (11, 7)


@pytest.mark.parametrize(
    ("mesh", "counts"),
    [pytest.param({"data": 8}, (1, 4), marks=pytest.mark.slow), ({"data": 2, "fsdp": 4}, (4, 8))],
    ids=["data", "data-fsdp"],
)
def test_gradients_cross_the_batch_axes_once_a_step_for_1_4_and_8_microbatches(mesh, counts):
    """The compiled program sums every gradient once, after the loop, and sums nothing inside it."""
    crossing = {m: gradient_collectives(m, **mesh) for m in counts}
    for parameters, (once, repeated) in crossing.values():
        assert repeated == 0 and parameters <= once <= 1.02 * parameters, crossing
    assert len({crossing[m] for m in counts if m > 1}) == 1


def test_an_average_of_the_parameters_follows_them_and_is_what_is_evaluated():
    step, state = line_step(ema_decay=0.75)
    average = np.asarray(state.params["slope"], np.float64)
    for _ in range(3):
        state, *_ = step(state, line_batch())
        average = 0.75 * average + 0.25 * np.asarray(state.params["slope"], np.float64)
    assert_close(state.extra["average"]["slope"], average)
    assert state.eval_params is state.extra["average"]
    assert "average" not in line_step()[1].extra and "slope" in line_step()[1].eval_params


def test_steps_and_examples_are_counted_and_the_schedule_is_followed():
    step, state = line_step()
    for index in range(3):
        state, scalars, _ = step(state, line_batch())
        assert (int(state.step), int(state.examples)) == (index + 1, 40 + ROWS * (index + 1))
        assert float(scalars["learning_rate"]) == np.float32(0.1 / (1 + index))
    assert (state.step.dtype, state.examples.dtype) == (jnp.int32, jnp.uint32)


def test_every_step_and_microbatch_draws_its_own_randomness_again_the_same_from_the_same_seed():
    def noise(num_steps=3, **options):
        step, state = line_step(**options)
        drawn = []
        for _ in range(num_steps):
            state, scalars, _ = step(state, line_batch())
            drawn.append(float(scalars["noise"]))
        return drawn

    first = noise()
    assert len(set(first)) == 3
    assert noise() == first
    assert not set(noise(seed=1)) & set(first)
    # The mean of two normal draws; of one draw taken twice it would be that draw.
    assert not set(noise(num_microbatches=2)) & set(first)


def test_groups_of_devices_that_sum_apart_draw_apart():
    """With one key for all the mean of their draws would be the draw of one."""
    with mesh_context(make_mesh({"data": 2, "fsdp": 1, "context": 1, "expert": 1, "model": 1}, jax.devices()[:2])):
        of_groups, state = line_step(2, groups={"data": 2})
        _, scalars, _ = of_groups(state, line_batch())
        _, alone, _ = line_step(2)[0](state, line_batch())
    assert_close({name: scalars[name] for name in ("loss", "error")}, {name: alone[name] for name in ("loss", "error")})
    key = jax.random.fold_in(jax.random.key(0), 0)
    draws = [[jax.random.normal(jax.random.fold_in(k, m), ()) for m in range(2)] for k in jax.random.split(key, 2)]
    assert_close(scalars["noise"], np.mean(draws))
    assert len(set(np.asarray(draws).flat)) == 4


def test_a_reduced_gradient_is_divided_in_the_type_of_its_parameter():
    """By a weight that is a whole number it would stay in bfloat16, and so would its norm and the moments."""
    _, state = line_step()

    def gradient(params, carry, *unused):
        return {"slope": jnp.ones(D, jnp.bfloat16)}, jnp.int32(3), carry, {"loss": PAIR}

    step = make_train_step(gradient, optax.with_extra_args_support(optax.sgd(0.1)), [], seed=0)
    gradients = step(dataclasses.replace(state, extra={}), line_batch())[2]
    np.testing.assert_allclose(gradients["slope"], 1 / 3, rtol=1e-6)


def test_a_batch_without_weight_changes_nothing_and_is_finite():
    step, state = line_step()
    after, scalars, _ = step(state, line_batch(weight=0))
    np.testing.assert_array_equal(after.params["slope"], state.params["slope"])
    assert float(scalars["loss"]) == float(scalars["gradient_norm"]) == 0


def test_an_update_that_is_no_number_leaves_all_but_the_counts_as_it_was():
    step, state = line_step(optimizer=optax.adam(0.1), ema_decay=0.9)
    batch = line_batch()
    before, _, _ = step(state, batch)
    after, scalars, _ = step(before, batch | {"x": np.full_like(batch["x"], np.nan)})
    for part in ("params", "optimizer", "carry"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, part), getattr(before, part))
    jax.tree.map(np.testing.assert_array_equal, after.extra["average"], before.extra["average"])
    assert scalars["skipped"] == 1 and (int(after.step), int(after.examples)) == (2, 40 + 2 * ROWS)


def test_progress_is_told_as_each_microbatch_ends():
    told = []
    step, state = line_step(3, on_microbatch=lambda count, index, loss: told.append((count, int(index), float(loss))))
    step(state, line_batch())
    jax.effects_barrier()
    assert sorted(t[:2] for t in told) == [(3, 0), (3, 1), (3, 2)]
    assert len({loss for *_, loss in told}) == 3


def test_two_scalars_of_one_name_are_refused():
    class Reports(StepTransform):
        name = "mine"

        def update(self, context, change, memory):
            return change, memory, {"loss": jnp.float32(3)}

    step, state = line_step(transforms=[Reports()])
    with pytest.raises(ValueError, match=r"^a scalar of mine and another one are called loss; rename one"):
        step(state, line_batch())


def test_evaluation_returns_the_objectives_pairs_and_changes_nothing():
    graph, params = nnx.split(Line())
    batch = line_batch()

    def evaluate(model, batch):
        return squared_error(model, {"last": jnp.zeros(ROWS)}, batch, None)[1][1]

    eval_step = jax.jit(make_eval_step(Graphs(graph, {}), evaluate))
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
    """From the loss of a uniform guess, ln 37 + 1/2 for logits of unit variance, to almost nothing in 60 steps."""
    config = base.get_config()
    config.model.update(
        num_layers=1, embed_dim=48, num_heads=4, num_kv_heads=2, mlp_dim=96, vocab_size=37, max_length=29,
        dtype="float32", layer_loop="scan",
    )  # fmt: skip
    config.mesh.fsdp = 1
    config.train.update(steps=60, global_batch=4, sequence_length=29)
    config.optimizer.update(learning_rate=1e-2, warmup_steps=5)
    run = assembly.assemble(config, devices=jax.devices()[:1])
    batch, losses = jax.device_put(packed_batch([[29]] * 4, 29, 37)), []
    with mesh_context(run.mesh):
        state = run.init()
        for _ in range(60):
            state, scalars = run.train_step(state, batch)
            losses.append(scalars["loss"])
    assert abs(float(losses[0]) - (np.log(37) + 0.5)) < 0.3
    assert float(losses[-1]) < 0.05
