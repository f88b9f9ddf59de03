# SPDX-License-Identifier: Apache-2.0
"""Routed experts compute what a loop over all of them does, wherever they lie."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.base import MESH_AXES
from layers import experts
from parallelism.mesh import make_mesh, mesh_context
from tests.support import ROOT, assert_close, random_weights

B, T, D, F, E, K = 8, 6, 12, 20, 8, 3
ROOMY = 3.0  # places over the mean load, so many that none is dropped: E / K would hold all pairs of a device
MESHES = [{"expert": 8}, {"data": 4, "expert": 2}, {"fsdp": 2, "expert": 4}, {"expert": 2, "fsdp": 2, "model": 2}]


def made(**changes):
    """Return (graph, float32 weights)."""
    sizes = dict(embed_dim=D, mlp_dim=F, num_experts=E, experts_per_token=K, shared_experts=2, out_scale=1.0)
    how = dict(capacity=0.0, router="softmax", gate_scale=1.0)
    graph, state = nnx.split(nnx.eval_shape(lambda: experts.Experts(**sizes | how | changes, rngs=nnx.Rngs(0))))
    return graph, random_weights(nnx.to_pure_dict(state))


def tokens():
    """Return (x [B, T, D], counted [B, T]) with some padding."""
    counted = np.ones((B, T), bool)
    counted[-1, 2:] = False
    return np.random.default_rng(1).standard_normal((B, T, D)).astype(np.float32), counted


def swiglu(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def loop(weights, x_BTD, counted_BT, *, router, gate_scale):
    """Return the mixture with every expert applied to every token."""
    scores = experts.SCORES[router](x_BTD @ weights["router"])
    chosen = np.argsort(-np.asarray(jax.lax.stop_gradient(scores + weights["bias"])), axis=-1)[..., :K]
    gates = jnp.where((chosen[..., None] == np.arange(E)).any(axis=-2), scores, 0)
    gates = gate_scale * gates / gates.sum(axis=-1, keepdims=True) * counted_BT[..., None]
    every = [swiglu(x_BTD, *(weights[name][e] for name in ("gate", "up", "down"))) for e in range(E)]
    shared = swiglu(x_BTD, *(weights["shared"][name] for name in ("gate", "up", "down")))
    return shared + sum(gates[..., e, None] * y for e, y in enumerate(every))


def observed(function, weights, x):
    """Return a weighted sum of what a function of both returns, and its gradients by both."""
    toward = np.random.default_rng(2).standard_normal(x.shape).astype(np.float32)
    return jax.value_and_grad(lambda *inputs: (function(*inputs) * toward).sum(), argnums=(0, 1))(weights, x)


@functools.cache
def by_loop(router: str, gate_scale: float):
    (x, counted), (_, weights) = tokens(), made()
    value, (of_weights, of_x) = observed(
        lambda weights, x: loop(weights, x, counted, router=router, gate_scale=gate_scale), weights, x
    )
    return value, of_weights, of_x


def by_layer(mesh, **changes):
    """Return the same of the layer, compiled for a mesh whose devices hold some experts each."""
    (x, counted), (graph, weights) = tokens(), made(**changes)

    @jax.jit
    def of_layer(weights, x):
        return observed(lambda weights, x: nnx.merge(graph, weights)(x, counted)[0], weights, x)

    with mesh_context(make_mesh(dict.fromkeys(MESH_AXES, 1) | mesh, jax.devices()[: math.prod(mesh.values())])):
        value, (of_weights, of_x) = of_layer(weights, x)
    return value, of_weights, of_x


def assert_same(actual, expected):
    """But for the bias, whose gradient is no slope."""
    actual[1].pop("bias"), expected[1].pop("bias", None)
    assert_close(actual, expected)


@pytest.mark.parametrize("capacity", [0.0, ROOMY], ids=["dropless", "capacity"])
@pytest.mark.parametrize(("router", "gate_scale"), [("softmax", 1.0), ("sigmoid", 2.5)])
def test_on_one_device_the_layer_is_the_loop(router, gate_scale, capacity):
    expected = by_loop(router, gate_scale)
    assert_same(by_layer({"data": 1}, router=router, gate_scale=gate_scale, capacity=capacity), expected)


@pytest.mark.parametrize("capacity", [0.0, ROOMY], ids=["dropless", "capacity"])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(f"{axis}{size}" for axis, size in mesh.items()))
def test_experts_on_several_devices_are_the_loop(mesh, capacity):
    assert_same(by_layer(mesh, capacity=capacity), by_loop("softmax", 1.0))


def adversarial(mesh, **changes):
    """Return (answers, dropped) where a bias sends every token to the experts 0, 1 and 2."""
    (x, counted), (graph, weights) = tokens(), made(**changes)
    weights["bias"] = -10 * np.arange(E, dtype=np.float32)
    run = jax.jit(lambda weights, x: nnx.merge(graph, weights)(x, counted))
    with mesh_context(make_mesh(dict.fromkeys(MESH_AXES, 1) | mesh, jax.devices()[: math.prod(mesh.values())])):
        y, figures = run(weights, x)
    return np.asarray(y), float(figures["dropped"]), weights


def test_nothing_is_dropped_where_every_token_goes_to_one_device():
    """Three experts of eight devices get all that there is: one exchange of tokens is not enough."""
    y, dropped, weights = adversarial({"expert": 8})
    assert dropped == 0
    x, counted = tokens()
    assert_close(y, np.asarray(loop(weights, x, counted, router="softmax", gate_scale=1.0)))


@pytest.mark.parametrize("mesh", [{"data": 1}, {"expert": 2}], ids=["one device", "two devices"])
def test_what_exceeds_the_capacity_is_counted_exactly(mesh):
    """Each of a device's experts has ceil(1 * pairs / E) places, of which 5 get none of the pairs."""
    _, dropped, _ = adversarial(mesh, capacity=1.0)
    num_devices = math.prod(mesh.values())
    counted = tokens()[1].reshape(num_devices, -1).sum(axis=1)
    places = math.ceil(K * B * T / num_devices / E)
    assert dropped * K == pytest.approx(sum(K * max(0, count - places) for count in counted))


def test_the_bias_gets_how_much_more_than_the_mean_an_expert_has_to_do():
    (x, counted), (graph, weights) = tokens(), made()
    bias_gradient = by_layer({"expert": 2})[1]["bias"]
    with mesh_context(make_mesh(dict.fromkeys(MESH_AXES, 1), jax.devices()[:1])):
        load = nnx.merge(graph, weights)(x, counted)[1]["load"]
    assert load.sum() == K * counted.sum()
    np.testing.assert_array_equal(bias_gradient, load - load.mean())


def test_balancing_brings_a_skewed_router_near_even_load_in_300_steps(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import moe

    violations = moe.violations(2048)
    assert len(violations) == 300
    assert violations[0] > 1.5 and violations[-20:].max() < moe.BALANCED, (violations[0], violations[-20:])
