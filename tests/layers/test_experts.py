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
    scores = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[router](x_BTD @ weights["router"])
    chosen = np.argsort(-np.asarray(jax.lax.stop_gradient(scores + weights["bias"])), axis=-1)[..., :K]
    gates = jnp.where((chosen[..., None] == np.arange(E)).any(axis=-2), scores, 0)
    gates = gate_scale * gates / gates.sum(axis=-1, keepdims=True) * counted_BT[..., None]
    return mixed(weights, x_BTD, gates)


def mixed(weights, x_BTD, gates_BTE):
    """Return the shared SwiGLU and all experts, weighed by their gates."""
    every = [swiglu(x_BTD, *(weights[name][e] for name in ("gate", "up", "down"))) for e in range(E)]
    shared = swiglu(x_BTD, *(weights["shared"][name] for name in ("gate", "up", "down")))
    return shared + sum(gates_BTE[..., e, None] * y for e, y in enumerate(every))


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


def on_one_device(inputs, **changes):
    """Return what the layer returns for (x, counted)."""
    graph, weights = made(**changes)
    with mesh_context(make_mesh(dict.fromkeys(MESH_AXES, 1), jax.devices()[:1])):
        return jax.device_get(jax.jit(lambda weights, *inputs: nnx.merge(graph, weights)(*inputs))(weights, *inputs))


def test_what_is_dropped_are_the_later_tokens_and_second_choices_before_first():
    """One place in each expert, given away one by one: arXiv:2006.16668, algorithm 1."""
    (x, counted), (_, weights) = tokens(), made()
    y, figures = on_one_device((x, counted), capacity=1.0 / K / 2)
    places = math.ceil(B * T / E / 2)
    scores = np.asarray(jax.nn.softmax(x @ weights["router"])).reshape(B * T, E)
    chosen = np.argsort(-(scores + weights["bias"]), axis=-1)[:, :K]
    gates = np.take_along_axis(scores, chosen, axis=-1)
    gates, room, kept = gates / gates.sum(axis=-1, keepdims=True), [places] * E, np.zeros((B * T, E))
    for choice in range(K):
        for token in np.flatnonzero(counted):
            expert = chosen[token, choice]
            kept[token, expert], room[expert] = gates[token, choice] * (room[expert] > 0), room[expert] - 1
    assert_close(y, np.asarray(mixed(weights, x, kept.reshape(B, T, E))))
    assert figures["dropped"] * K == pytest.approx(K * counted.sum() - np.count_nonzero(kept))


def test_the_gate_of_one_expert_alone_is_its_score():
    (x, counted), (_, weights) = tokens(), made()
    y, _ = on_one_device((x, counted), experts_per_token=1, gate_scale=2.5)
    scores = np.asarray(jax.nn.softmax(x @ weights["router"]))
    chosen = np.argmax(scores + weights["bias"], axis=-1)[..., None] == np.arange(E)
    assert_close(y, np.asarray(mixed(weights, x, scores * chosen * counted[..., None])))


@pytest.mark.parametrize("router", list(experts.LOG_SCORES))
def test_gates_are_numbers_whatever_the_router_says(router):
    """Scores of the chosen may all be 0 in float32, where the bias chose them."""
    graph, weights = made(router=router)
    x, counted = np.full((1, 2, D), 9, np.float32), np.ones((1, 2), bool)
    weights["router"] = np.full((D, E), -9, np.float32) * (np.arange(E) > 0)
    weights["bias"] = 10 * np.arange(E, dtype=np.float32)

    def of_layer(weights):
        y, figures = nnx.merge(graph, weights)(x, counted)
        return y.sum() + figures["balance"], figures

    with mesh_context(make_mesh(dict.fromkeys(MESH_AXES, 1), jax.devices()[:1])):
        (y, figures), of_weights = jax.jit(jax.value_and_grad(of_layer, has_aux=True))(weights)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((y, figures, of_weights)))


def test_what_is_told_of_routers_is_what_their_formulas_say():
    """Loss terms and figures of two layers, from whole scores; padding counts nowhere."""
    inputs = (x, counted) = tokens()
    found = on_one_device(inputs)[1], on_one_device((2 * x, counted))[1]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *found)
    penalty, scalars = experts.terms(stacked, balance_loss=0.3, z_loss=0.7)
    weights, wanted, loads, entropies = made()[1], 0.0, [], []
    for tokens_MD in (x[counted], 2 * x[counted]):
        logits = tokens_MD @ weights["router"]
        scores = np.asarray(jax.nn.softmax(logits))
        chosen = np.argsort(-(scores + weights["bias"]), axis=-1)[:, :K]
        loads.append(np.bincount(chosen.reshape(-1), minlength=E) / chosen.size)
        entropies.append(-(scores * np.log(scores)).sum(axis=-1).mean())
        balance = E * (loads[-1] * scores.mean(axis=0)).sum()
        z = (np.log(np.exp(logits).sum(axis=-1)) ** 2).mean()
        wanted += len(tokens_MD) * (0.3 * balance + 0.7 * z)
    assert_close(penalty, wanted)
    means = {name: np.asarray(total / weight) for name, (total, weight) in scalars.items()}
    assert_close(means, {
        "expert_load": np.array(loads), "largest_load": np.max(loads), "smallest_load": np.min(loads),
        "load_violation": np.max(loads) * E - 1, "dropped_share": 0.0, "router_entropy": np.mean(entropies),
    })  # fmt: skip


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
