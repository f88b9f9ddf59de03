# SPDX-License-Identifier: Apache-2.0
"""Gradients through an inner loop are those of finite differences and of closed forms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers import inner_loop
from layers.axes import weight
from layers.inner_loop import FIRST_ORDER, MAML, REPTILE, InnerLoop
from tests.support import assert_close

LOOP = InnerLoop(MAML, num_steps=3, eval_steps=3, rate=0.2)


def tasks(count: int = 3) -> tuple[dict, dict]:
    """Return supports and queries: x [count, 4, 2] and y [count, 4] each."""
    rng = np.random.default_rng(0)
    return tuple({"x": rng.normal(size=(count, 4, 2)), "y": rng.normal(size=(count, 4))} for _ in range(2))


def weights() -> dict:
    rng = np.random.default_rng(1)
    return {"into": rng.normal(size=(2, 3)), "out": rng.normal(size=(3,))}


def loss(params, examples):
    """Return the squared error of a network whose Hessian depends on the parameters."""
    return jnp.mean(jnp.square(jnp.tanh(examples["x"] @ params["into"]) @ params["out"] - examples["y"]))


def total(loop: InnerLoop, params: dict, scales: dict | None = None) -> jax.Array:
    """Return the sum over tasks of what trains on them."""
    scales = jax.tree.map(jnp.ones_like, params) if scales is None else scales
    return jax.vmap(lambda *task: loop.minimized(loss, params, scales, *task)[0])(*tasks()).sum()


def test_the_gradient_through_the_inner_loop_is_that_of_finite_differences():
    """In float64, where central differences of step h are off by about h^2 = 1e-10 and 1e-16 / h = 1e-11."""
    with jax.enable_x64(True):
        params, step = weights(), 1e-5
        value, slopes = (jax.jit(f) for f in (lambda p: total(LOOP, p), jax.grad(lambda p: total(LOOP, p))))
        exact = slopes(params)
        for name, array in params.items():
            for place in np.ndindex(array.shape):
                nudge = np.zeros_like(array)
                nudge[place] = step
                ends = [value(params | {name: array + sign * nudge}) for sign in (1, -1)]
                assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float(exact[name][place]), rel=1e-6, abs=1e-8)


def over_tasks(of_task) -> dict:
    """Return the sum over tasks of of_task(params, support, query), with each step written out, as one program."""

    def sums(params):
        of_tasks = (of_task(params, *(jax.tree.map(lambda a, n=n: a[n], of) for of in tasks())) for n in range(3))
        return jax.tree.map(lambda *terms: sum(terms), *of_tasks)

    return jax.jit(sums)(weights())


def stepped(params: dict, examples: dict, count: int = LOOP.num_steps) -> dict:
    """Return the parameters after some gradient steps."""
    for _ in range(count):
        params = jax.tree.map(lambda p, g: p - LOOP.rate * g, params, jax.grad(loss)(params, examples))
    return params


def gradients(loop: InnerLoop) -> dict:
    return jax.jit(jax.grad(lambda params: total(loop, params)))(weights())


def test_first_order_maml_takes_the_gradient_at_the_adapted_parameters_and_so_differs():
    actual = gradients(dataclasses.replace(LOOP, method=FIRST_ORDER))
    expected = over_tasks(lambda params, support, query: jax.grad(loss)(stepped(params, support), query))
    assert_close(actual, expected)
    exact = gradients(LOOP)
    assert all(np.abs(exact[name] - actual[name]).max() > 0.05 * np.abs(exact[name]).max() for name in exact)


def test_reptiles_gradient_is_the_way_back_from_the_adapted_parameters():
    """The sum over tasks of theta - theta_k, after steps on support and query together."""

    def way_back(params, support, query):
        both = jax.tree.map(lambda s, q: jnp.concatenate([s, q]), support, query)
        return jax.tree.map(jnp.subtract, params, stepped(params, both))

    assert_close(gradients(dataclasses.replace(LOOP, method=REPTILE)), over_tasks(way_back))


def test_learned_step_sizes_have_a_gradient_of_their_own():
    """After one step, d L(query) / d scale = -rate * gradient on the support * gradient on the query."""
    loop, params = dataclasses.replace(LOOP, num_steps=1), weights()
    ones = jax.tree.map(np.ones_like, params)

    def of_scales(params, support, query):
        slopes, after = jax.grad(loss)(params, support), jax.grad(loss)(stepped(params, support, 1), query)
        return jax.tree.map(lambda g, a: -loop.rate * g * a, slopes, after)

    assert_close(jax.jit(jax.grad(lambda scales: total(loop, params, scales)))(ones), over_tasks(of_scales))


class Pair(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = weight(rngs, (2, 3), (None, "embed"), 1.0), weight(rngs, (3,), ("embed",), 1.0)


def test_scales_begin_at_one_lie_like_their_weights_and_are_not_adapted():
    model = inner_loop.add_rates(Pair(nnx.Rngs(0)))
    build, params, scales = inner_loop.split(model)
    assert params.keys() == scales.keys() == {"first", "second"}
    assert all((scales[name] == 1).all() and scales[name].shape == params[name].shape for name in params)
    assert model.inner_rates["first"].scale.get_metadata("out_sharding") == (None, "embed")
    changed = build(jax.tree.map(jnp.zeros_like, params))
    assert not changed.first[...].any() and (changed.inner_rates["first"].scale[...] == 1).all()
