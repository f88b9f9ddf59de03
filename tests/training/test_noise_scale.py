# SPDX-License-Identifier: Apache-2.0
"""The gradient noise scale: near the truth where that is known, of real parts on any mesh, nothing where it is off."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from configs.errors import ConfigError
from core import assembly
from parallelism.mesh import mesh_context
from settings.validation import validate
from tests.one_step import BATCH, batch, placed, small_config
from tests.support import random_weights, relative_error
from training.state import TrainState
from training.step import Graphs, make_gradient, make_train_step
from training.step_transform import StepTransform
from training.transforms import noise
from training.transforms.guard import Guard

D, ROWS, PARTS, STEPS = 40, 64, 8, 300
EXPERTS = (("num_experts", 4), ("mlp_dim", 12))


class Point(nnx.Module):
    def __init__(self):
        self.place = nnx.Param(jnp.zeros(D))


def half_square(model, carry, batch, key):
    """Of the distance to points around a centre: the gradient is the place less their mean, its noise theirs."""
    total, weight = jnp.sum((model.place[...] - batch["points"]) ** 2) / 2, jnp.float32(len(batch["points"]))
    return (total, weight), (carry, {"loss": (total, weight)})


class Pull(StepTransform):
    """Adds to the gradient of the batch, as l2_init does."""

    name = "pull"

    def change_gradients(self, gradients, state):
        return jax.tree.map(lambda gradient: gradient + 3.0, gradients)


@pytest.mark.parametrize(("scale", "others"), [(3.0, []), (60.0, []), (60.0, [Pull()])])
def test_on_a_quadratic_with_known_noise_the_estimate_is_within_a_tenth(scale, others):
    """tr(Sigma) / |G|^2 = `scale`, below a part's 8 rows and near the 64 of the batch; l2_init is not part of G."""
    rng = np.random.default_rng(0)
    deviations = rng.uniform(0.5, 2.0, D)
    centre = rng.standard_normal(D)
    centre *= math.sqrt(np.sum(deviations**2) / scale) / np.linalg.norm(centre)
    graph, params = nnx.split(Point())
    params, optimizer = nnx.to_pure_dict(params), optax.with_extra_args_support(optax.set_to_zero())
    gradient = make_gradient(
        Graphs(graph, {}),
        half_square,
        num_microbatches=PARTS,
        part_square=functools.partial(noise.part_square, optax.tree.norm),
    )
    transforms = [Guard(lambda step: 0.0), *others, noise.Noise()]
    step = jax.jit(make_train_step(gradient, optimizer, transforms, seed=0, num_parts=PARTS))
    extra = {transform.name: transform.init(params) for transform in transforms}
    state = TrainState(jnp.int32(0), jnp.uint32(0), params, optimizer.init(params), {}, extra)
    for _ in range(STEPS):
        points = (centre + deviations * rng.standard_normal((ROWS, D))).astype(np.float32)
        state, scalars, _ = step(state, {"points": points})
    assert abs(float(scalars["noise_scale"]) / scale - 1) < 0.1


def parts_of(config, together: int) -> list[np.ndarray]:
    """Return the rows of each part: every M-th row of what `together` neighbouring shards have."""
    count = config.train.gradient_accumulation
    shards = config.mesh.data * config.mesh.fsdp * config.mesh.expert // together
    return [rows[m::count] for rows in np.split(np.arange(BATCH), shards) for m in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "whole_bytes", "together", "of_model"),
    [
        ({"data": 2, "fsdp": 2}, 0, 2, EXPERTS),
        ({"fsdp": 2, "model": 2}, 2**30, 1, ()),
        ({"data": 2, "fsdp": 2, "context": 2}, 2**30, 4, EXPERTS),
        ({"data": 2, "expert": 2}, 0, 2, EXPERTS),
        ({"fsdp": 2, "expert": 2}, 2**30, 2, EXPERTS),
    ],
    ids=[
        "copies with experts",
        "devices of a model",
        "the compiler with experts",
        "devices that share experts",
        "devices that share experts and gather all weights",
    ],
)
def test_squares_are_those_of_the_parts_gradients(monkeypatch, mesh, whole_bytes, together, of_model):
    """Each part's gradient is computed again alone. That of a router's bias is not a derivative, and is left out."""
    monkeypatch.setattr(assembly, "FULL_GRADIENT_BYTES", whole_bytes)
    config = plain_config(of_model, **mesh)
    config.train.update(gradient_accumulation=2)
    config.batch.noise_scale = True
    run = assembly.assemble(config, devices=jax.devices()[: math.prod(mesh.values())])
    params, rows = random_weights(run.abstract_state.params), batch()
    with mesh_context(run.mesh):
        inputs = placed((state_of(run, params), rows), (run.abstract_state, run.abstract_batch))
        state, _, gradients = run.train_step_with_grads(*inputs)
    parts = [jax.tree.map(lambda array, part=part: array[part], rows) for part in parts_of(config, together)]
    squares = [alone_square(params, part, of_model) for part in parts]
    weight = sum(w for _, w in squares)
    small = sum(square for square, _ in squares) / weight
    big = norm_of_slopes(gradients) ** 2
    wanted = noise.update({"gradient": 0.0, "noise": 0.0}, small, big, BATCH, len(squares))
    for name, value in wanted.items():
        assert relative_error(state.extra["noise"][name], value) < 1e-4, name  # differences of squares


def plain_config(of_model: tuple, **mesh):
    """Return a configuration with simple updates, which the tests do not look at."""
    config = small_config(**mesh)
    config.model.update(dict(of_model))
    config.optimizer.update(name="sgd", clip_norm=0.0)
    return config


def state_of(run, params):
    """Return a state before the first step."""
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), run.abstract_state)
    return dataclasses.replace(state, params=params)


@functools.cache
def alone(of_model: tuple = ()) -> assembly.Run:
    return assembly.assemble(plain_config(of_model), devices=jax.devices()[:1])


def norm_of_slopes(gradients) -> float:
    gradients["stack"]["blocks"]["mlp"].pop("bias", None)
    return math.sqrt(sum(np.sum(np.float64(leaf) ** 2) for leaf in jax.tree.leaves(jax.device_get(gradients))))


def alone_square(params, rows, of_model: tuple) -> tuple[float, float]:
    """Return (|sum of gradients|^2 / weight, weight) of some rows, on one device; rows are filled up with padding."""
    run = alone(of_model)
    padded = jax.tree.map(lambda a: np.concatenate([a, np.zeros((BATCH - len(a), *a.shape[1:]), a.dtype)]), rows)
    with mesh_context(run.mesh):
        _, scalars, gradients = run.train_step_with_grads(state_of(run, params), padded)
    weight = float(scalars["tokens"])
    return weight * norm_of_slopes(gradients) ** 2, weight


def test_off_by_default_there_is_nothing_of_it():
    run = alone()
    assert "noise" not in run.abstract_state.extra
    with mesh_context(run.mesh):
        _, scalars = jax.eval_shape(run.train_step, run.abstract_state, run.abstract_batch)
    assert "noise_scale" not in scalars and "part_square" not in scalars


@pytest.mark.parametrize(
    ("mesh", "microbatches", "parts"),
    [({"fsdp": 8}, 1, 1), ({"data": 2, "fsdp": 4}, 1, 2), ({"fsdp": 8}, 2, 2)],
    ids=str,
)
def test_a_batch_of_one_part_is_refused_before_it_is_compiled(mesh, microbatches, parts):
    config = small_config(**mesh)
    config.train.gradient_accumulation = microbatches
    config.batch.noise_scale = True
    if parts > 1:
        return validate(config, 8)
    with pytest.raises(ConfigError, match=r"^the noise scale compares parts of a batch, .*$"):
        validate(config, 8)


def test_where_parts_agree_better_than_by_chance_the_noise_scale_is_0():
    """The estimate of the noise is then less than 0, and no batch is."""
    nothing = {"gradient": 0.0, "noise": 0.0}
    memory = noise.update(nothing, small=jnp.float32(1.0), big=jnp.float32(2.0), rows=8, num_parts=4)
    assert memory["noise"] < 0 < memory["gradient"] and noise.estimate(memory) == 0
    assert noise.estimate({"gradient": jnp.float32(-1.0), "noise": jnp.float32(2.0)}) == noise.LARGEST
