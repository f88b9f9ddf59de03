# SPDX-License-Identifier: Apache-2.0
"""Trajectories: the first is the model alone, each has its own noise, and none depends on other rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from objectives import breadth
from objectives.breadth import Breadth
from objectives.recursive import Recursive
from tests.support import random_weights
from tests.trm_cases import CELLS, ROWS, abstract, small_batch, small_model

STEPS = 3
OBJECTIVE = Recursive(ROWS, CELLS, max_steps=STEPS)


@functools.cache
def made() -> tuple:
    """Return (graph, parameters)."""
    graph, shapes = abstract(small_model(num_layers=1), scan=True)
    return graph, jax.tree.map(jnp.asarray, random_weights(shapes))


def model():
    return nnx.merge(*made())


def explored(how: Breadth, rows=slice(None)) -> breadth.Explored:
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), ROWS))[rows]
    batch = {name: array[rows] for name, array in small_batch().items()}
    graph, params = made()
    explore = jax.jit(lambda params, *rest: breadth.explore(OBJECTIVE, nnx.merge(graph, params), *rest, how))
    return jax.device_get(explore(params, batch, keys))


def test_the_first_trajectory_is_what_evaluation_answers():
    found = explored(Breadth(3, STEPS, noise=1.0))
    answers, halts = OBJECTIVE.predict(model(), small_batch())
    np.testing.assert_array_equal(found.tokens[-1, :, 0], answers)
    np.testing.assert_allclose(found.halts[-1, :, 0], halts, rtol=1e-4, atol=1e-5)
    assert found.tokens.shape == (STEPS, ROWS, 3, CELLS) and found.changes.shape == (STEPS, ROWS, 3)


@pytest.mark.parametrize(("vocab_size", "kind"), [(1 << 15, np.int16), (50_000, np.int32)])
def test_answers_have_room_for_every_token(vocab_size, kind):
    graph, shapes = abstract(small_model(num_layers=1, vocab_size=vocab_size), scan=True)
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), ROWS))
    found = jax.eval_shape(
        lambda params: breadth.explore(OBJECTIVE, nnx.merge(graph, params), small_batch(), keys, Breadth(2, 1)), shapes
    )
    assert found.tokens.dtype == kind


def test_a_trajectory_depends_neither_on_others_nor_on_other_puzzles():
    every = explored(Breadth(4, STEPS, noise=1.0))
    few = explored(Breadth(2, STEPS, noise=1.0), rows=np.array([2]))
    np.testing.assert_allclose(few.halts[:, 0], every.halts[:, 2, :2], rtol=1e-4, atol=1e-5)
    assert len({logit for logit in every.halts[-1].ravel().tolist()}) == ROWS * 4, "each has noise of its own"


@pytest.mark.parametrize(
    ("how", "differs"), [(Breadth(2, 1, noise=0.0), False), (Breadth(2, 1, 0.0, random_start=1.0), True)]
)
def test_without_noise_trajectories_differ_by_their_start_alone(how, differs):
    halts = explored(how).halts[-1]
    assert (np.abs(halts[:, 0] - halts[:, 1]) > 1e-6).all() == differs


def test_the_change_of_a_step_is_the_root_mean_square_over_the_latent():
    objective = OBJECTIVE.plain
    found = explored(Breadth(1, 2))
    carry = objective.init_carry(model(), ROWS, jax.random.key(0))
    first, *_ = objective.step_on(model(), carry, small_batch())
    second, *_ = objective.step_on(model(), first, small_batch())
    moved = second["states"][0] - first["states"][0]
    np.testing.assert_allclose(found.changes[1, :, 0], jnp.sqrt((moved**2).mean(axis=(1, 2))), rtol=1e-3)
