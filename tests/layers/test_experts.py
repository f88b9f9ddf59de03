# SPDX-License-Identifier: Apache-2.0
"""Routed experts compute the same as a loop over all of them, on any devices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.base import MESH_AXES
from layers import taps
from layers.experts import experts
from parallelism.mesh import make_mesh, mesh_context
from tests.support import ROOT, assert_close, random_weights
from training.step import mean

B, T, D, F, E, K = 8, 6, 12, 20, 8, 3
ROOMY = 3.0  # places over the mean load, enough that none is dropped: E / K would hold all pairs of a device
MESHES = [
    ({"expert": 8}, 0.0), ({"expert": 2, "fsdp": 2, "model": 2}, 0.0), ({"fsdp": 2, "expert": 4}, ROOMY),
    ({"data": 4, "expert": 2}, ROOMY),
]  # fmt: skip


@functools.cache
def abstract(**changes):
    """Return (graph, shapes of the weights)."""
    sizes = dict(embed_dim=D, mlp_dim=F, num_experts=E, experts_per_token=K, shared_experts=2, out_scale=1.0)
    graph, state = nnx.split(nnx.eval_shape(lambda: experts.Experts(**sizes | changes, rngs=nnx.Rngs(0))))
    return graph, nnx.to_pure_dict(state)


def made(**changes):
    """Return (graph, float32 weights)."""
    graph, shapes = abstract(**dict(capacity=0.0, router="softmax", gate_scale=1.0) | changes)
    return graph, random_weights(shapes)


def tokens():
    """Return (x [B, T, D], counted [B, T]) with some padding."""
    counted = np.ones((B, T), bool)
    counted[-1, 2:] = False
    return np.random.default_rng(1).standard_normal((B, T, D)).astype(np.float32), counted


def swiglu(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


SCORES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}


def choice(weights, x, router: str = "softmax") -> np.ndarray:
    """Return the experts [..., K] of each token, the first choice first."""
    return np.argsort(-(SCORES[router](x @ weights["router"]) + weights["bias"]), axis=-1)[..., :K]


@functools.partial(jax.jit, static_argnames=("router", "gate_scale"))
def loop(weights, x_BTD, valid_BT, chosen_BTK, *, router: str, gate_scale: float):
    """Return the mixture with every expert applied to every token."""
    scores = SCORES[router](x_BTD @ weights["router"])
    gates = jnp.where((chosen_BTK[..., None] == np.arange(E)).any(axis=-2), scores, 0)
    gates = gate_scale * gates / gates.sum(axis=-1, keepdims=True) * valid_BT[..., None]
    return mixed(weights, x_BTD, gates)


@jax.jit
def mixed(weights, x_BTD, gates_BTE):
    """Return the shared SwiGLU and all experts, weighed by their gates."""
    every = swiglu(x_BTD, *(weights[name][:, None] for name in ("gate", "up", "down")))
    shared = swiglu(x_BTD, *(weights["shared"][name] for name in ("gate", "up", "down")))
    return shared + jnp.einsum("BTE,EBTD->BTD", gates_BTE, every)


def observed(function, weights, x):
    """Return a weighted sum of the function's first result, the gradients by both inputs, and the other results."""
    toward = np.random.default_rng(2).standard_normal(x.shape).astype(np.float32)

    def summed(*inputs):
        y, *told = function(*inputs)
        return (y * toward).sum(), (y, *told)

    (value, told), gradients = jax.value_and_grad(summed, argnums=(0, 1), has_aux=True)(weights, x)
    return value, gradients, told


@functools.partial(jax.jit, static_argnames=("router", "gate_scale"))
def by_loop(weights, x, counted, chosen, *, router: str, gate_scale: float):
    how = dict(router=router, gate_scale=gate_scale)
    return observed(lambda weights, x: (loop(weights, x, counted, chosen, **how),), weights, x)[:2]


@functools.partial(jax.jit, static_argnames="graph")
def of_layer(graph, weights, x, counted):
    return observed(lambda weights, x: nnx.merge(graph, weights)(x, counted), weights, x)


def on_mesh(axes: dict):
    return mesh_context(make_mesh(dict.fromkeys(MESH_AXES, 1) | axes, jax.devices()[: math.prod(axes.values())]))


def by_layer(axes, bias=None, **changes):
    """Return the same of the layer, compiled for a mesh whose devices hold some experts each."""
    (graph, weights), inputs = made(**changes), tokens()
    with on_mesh(axes):
        return jax.device_get(of_layer(graph, weights if bias is None else weights | {"bias": bias}, *inputs))


def assert_same(axes, *, router: str = "softmax", gate_scale: float = 1.0, capacity: float = 0.0):
    """The bias is an exception: its gradient is not a derivative."""
    how = dict(router=router, gate_scale=gate_scale)
    (x, counted), weights = tokens(), made()[1]
    value, gradients, _ = by_layer(axes, capacity=capacity, **how)
    expected, of_loop = by_loop(weights, x, counted, choice(weights, x, router), **how)
    gradients[0].pop("bias"), of_loop[0].pop("bias")
    assert_close((value, gradients), (expected, of_loop))


@pytest.mark.parametrize(
    ("router", "gate_scale", "capacity"), [("softmax", 1.0, 0.0), ("sigmoid", 2.5, ROOMY)], ids=["dropless", "capacity"]
)
def test_on_one_device_the_layer_is_the_loop(router, gate_scale, capacity):
    assert_same({"data": 1}, router=router, gate_scale=gate_scale, capacity=capacity)


@pytest.mark.parametrize(("axes", "capacity"), MESHES, ids=lambda given: str(given))
def test_experts_on_several_devices_are_the_loop(axes, capacity):
    assert_same(axes, capacity=capacity)


def test_the_bias_gets_how_much_more_than_the_mean_an_expert_has_to_do():
    (x, counted), weights = tokens(), made()[1]
    of_weights = by_layer({"expert": 8})[1][0]
    load = np.bincount(choice(weights, x)[counted].reshape(-1), minlength=E)
    assert load.sum() == K * counted.sum()
    np.testing.assert_array_equal(of_weights["bias"], load - load.mean())


TO_THREE = -10 * np.arange(E, dtype=np.float32)  # sends every token to the experts 0, 1 and 2


def test_nothing_is_dropped_where_every_token_goes_to_one_device():
    """Three experts of eight devices get all that there is: one exchange of tokens is not enough."""
    _, _, (y, figures) = by_layer({"expert": 8}, bias=TO_THREE)
    assert figures["dropped"] == 0
    (x, counted), (_, weights) = tokens(), made()
    chosen = choice(weights | {"bias": TO_THREE}, x)
    assert_close(y, np.asarray(loop(weights, x, counted, chosen, router="softmax", gate_scale=1.0)))


def test_what_exceeds_the_capacity_is_counted_exactly():
    """Each of a device's experts has ceil(1 * pairs / E) places; 5 of them get none of the pairs."""
    (graph, weights), inputs = made(capacity=1.0), tokens()
    with on_mesh({"expert": 2}):
        _, figures = jax.device_get(applied(graph, weights | {"bias": TO_THREE}, *inputs))
    counted = inputs[1].reshape(2, -1).sum(axis=1)
    places = math.ceil(K * B * T / 2 / E)
    assert figures["dropped"] * K == pytest.approx(sum(K * max(0, count - places) for count in counted))


@functools.partial(jax.jit, static_argnames="graph")
def applied(graph, weights, x, counted):
    return nnx.merge(graph, weights)(x, counted)


def on_one_device(inputs, **changes):
    """Return what the layer returns for (x, counted)."""
    graph, weights = made(**changes)
    return jax.device_get(applied(graph, weights, *inputs))


def test_what_is_dropped_are_the_later_tokens_and_second_choices_before_first():
    """One place in each expert, given away one by one: arXiv:2006.16668, algorithm 1."""
    (x, counted), (_, weights) = tokens(), made()
    y, figures = on_one_device((x, counted), capacity=1.0 / K / 2)
    places = math.ceil(B * T / E / 2)
    scores = np.asarray(jax.nn.softmax(x @ weights["router"])).reshape(B * T, E)
    chosen = choice(weights, x).reshape(B * T, K)
    gates = np.take_along_axis(scores, chosen, axis=-1)
    gates, room, kept = gates / gates.sum(axis=-1, keepdims=True), [places] * E, np.zeros((B * T, E))
    for place in range(K):
        for token in np.flatnonzero(counted):
            expert = chosen[token, place]
            kept[token, expert], room[expert] = gates[token, place] * (room[expert] > 0), room[expert] - 1
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
        return y.sum() + figures["shares"].sum(), figures

    with on_mesh({"data": 1}):
        (y, figures), of_weights = jax.jit(jax.value_and_grad(of_layer, has_aux=True))(weights)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((y, figures, of_weights)))


def test_what_is_told_of_routers_is_what_their_formulas_say():
    """Loss terms and figures of two layers, from whole scores; padding counts nowhere."""
    inputs = (x, counted) = tokens()
    found = on_one_device(inputs)[1], on_one_device((2 * x, counted))[1]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *found)
    penalty, scalars = jax.jit(functools.partial(experts.router_losses, balance_loss=0.3, z_loss=0.7))(stacked)
    weights, wanted, loads, entropies = made()[1], 0.0, [], []
    for tokens_MD in (x[counted], 2 * x[counted]):
        logits = tokens_MD @ weights["router"]
        scores = np.asarray(jax.nn.softmax(logits))
        chosen = choice(weights, tokens_MD)
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


def test_the_load_of_experts_is_that_of_all_pairs_of_a_step():
    """A microbatch with more padding has fewer pairs, and one of nothing but padding has none."""

    def scalars(*loads):
        load_LE = np.array([loads], np.float32)
        ones, zeros = load_LE.sum(axis=1) / K, np.zeros(1)
        figures = {"load": load_LE, "shares": load_LE, "tokens": ones}
        figures |= dict.fromkeys(("z", "entropy", "dropped"), zeros)
        return experts.router_losses(figures, balance_loss=0.0, z_loss=0.0)[1]

    def of_step(*microbatches):
        sums = jax.tree.map(lambda *parts: sum(parts), *microbatches)
        return {name: np.asarray(mean(pair)) for name, pair in sums.items()}

    cut = of_step(scalars(198, 0), scalars(0, 2))
    assert_close(cut["expert_load"], np.array([[0.99, 0.01]]))
    assert_close(cut, cut | {"largest_load": 1.0, "smallest_load": 0.0, "load_violation": 1.0})
    assert_close(of_step(scalars(100, 100), scalars(0, 0)), of_step(scalars(100, 100)))


def test_balancing_brings_a_skewed_router_near_even_load_in_300_steps(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import moe

    violations = moe.violations(1024)
    assert len(violations) == 300
    assert violations[0] > 1.5 and violations[-20:].max() < moe.BALANCED, (violations[0], violations[-20:])


@pytest.mark.parametrize(("mesh", "capacity"), [({"expert": 1}, ROOMY), ({"expert": 2, "data": 2}, 0.0)])
def test_hidden_units_are_measured_over_the_tokens_of_their_expert(mesh, capacity):
    graph, weights = made(capacity=capacity)
    x_BTD, counted = tokens()
    sizes = dict.fromkeys(MESH_AXES, 1) | mesh
    measures = {"size": taps.Measure("expert_hidden", jnp.abs, ("experts", "expert_mlp"))}

    def measured(weights):
        with taps.measure(measures) as found:
            nnx.merge(graph, weights)(x_BTD, counted)
        return found["size"]

    with mesh_context(make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])):
        sums_EF, counts_E1 = jax.device_get(jax.jit(measured)(weights))
    chosen = (choice(weights, x_BTD)[..., None] == np.arange(E)).any(axis=-2) & counted[..., None]
    hidden = [jax.nn.silu(x_BTD @ gate) * (x_BTD @ up) for gate, up in zip(weights["gate"], weights["up"], strict=True)]
    assert_close(sums_EF, np.stack([np.abs(h)[chosen[..., e]].sum(axis=0) for e, h in enumerate(hidden)]))
    np.testing.assert_array_equal(counts_E1[:, 0], chosen.sum(axis=(0, 1)))


@pytest.mark.parametrize("router", SCORES)
def test_the_entropy_of_a_router_is_that_of_its_normalised_scores(router):
    """Scores of a sigmoid do not sum to 1."""
    (graph, weights), (x, counted) = made(router=router), tokens()
    with on_mesh({"data": 1}):
        figures = jax.jit(lambda weights: nnx.merge(graph, weights)(x, counted)[1])(weights)
    scores = np.asarray(SCORES[router](x[counted] @ weights["router"]))
    shares = scores / scores.sum(axis=-1, keepdims=True)
    assert_close(figures["entropy"], -(shares * np.log(shares)).sum())
