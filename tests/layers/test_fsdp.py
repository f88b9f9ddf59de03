# SPDX-License-Identifier: Apache-2.0
"""Sharded weights: all-gathered for use, their gradients reduce-scattered; and the cases in which nothing changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from configs.base import BATCH_AXES
from layers import fsdp
from layers.axes import constrain
from layers.fsdp import (
    all_gather,
    all_gather_params,
    all_gather_params_ordered,
    grad_reduce_dtype,
    reduce_scatter,
)
from layers.products import QUANTIZED, einsum
from parallelism.axis_rules import rules_without, shard_map_rules
from parallelism.mesh import make_mesh, mesh_context
from tests.support import assert_close


def on_devices(size: int, function, in_specs, out_specs):
    """Return `function` as each of the first devices computes it for its part."""
    mesh = make_mesh({"data": 1, "fsdp": size, "expert": 1, "context": 1, "model": 1}, jax.devices()[:size])

    def call(*arguments):
        with mesh_context(mesh):
            mapped = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)
            return jax.jit(mapped)(*arguments)

    return call


def reduced(x: np.ndarray, dim: int, dtype=jnp.float32) -> np.ndarray:
    """Return what reduce_scatter makes of x [devices, ...], in float32."""

    def of_part(part):
        return reduce_scatter(part[0].astype(dtype), "fsdp", dim).astype(jnp.float32)

    return on_devices(len(x), of_part, P("fsdp"), P(*[None, None][:dim], "fsdp"))(x)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_reduce_scatter_is_the_sum_over_devices(size, dim):
    x = np.random.default_rng(0).standard_normal((size, 3 * size, 2 * size), np.float32)
    assert_close(reduced(x, dim), x.sum(axis=0))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", [2, 5, 6, 8])
def test_the_exchange_of_a_cpu_adds_up_to_the_bits_of_the_rings_of_a_tpu(size, dtype, monkeypatch):
    x = np.random.default_rng(0).standard_normal((size, 3 * size, 2 * size), np.float32)
    on_cpu = [reduced(x, dim, dtype) for dim in (0, 1)]
    monkeypatch.setattr(fsdp, "platform", lambda: "tpu")
    for dim, exchanged in enumerate(on_cpu):
        np.testing.assert_array_equal(exchanged, reduced(x, dim, dtype))


def test_the_gradients_of_many_tasks_are_reduced_under_vmap():
    """As those of an objective that differentiates through the updates of its tasks."""
    x = np.random.default_rng(0).standard_normal((4, 3, 8, 2), np.float32)
    of_tasks = jax.vmap(lambda part: reduce_scatter(part, "fsdp", 0))
    assert_close(on_devices(4, lambda part: of_tasks(part[0]), P("fsdp"), P(None, "fsdp"))(x), x.sum(axis=0))


def test_a_cpu_reduces_without_permutes(monkeypatch):
    """A permute for each hop would make 32 simulated devices wait for each other 31 times."""
    monkeypatch.delattr(jax.lax, "ppermute")
    x = np.random.default_rng(0).standard_normal((8, 24, 16), np.float32)
    assert_close(reduced(x, 0), x.sum(axis=0))


@pytest.mark.parametrize("large", [0, 1 << 26], ids=["permutes", "all-gathers"])
@pytest.mark.parametrize("size", [6, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_every_device_of_a_large_axis_gathers_all_shards(dim, size, large, monkeypatch):
    """In rings of an odd and of an even number of devices."""
    monkeypatch.setattr(fsdp, "WHOLE_TORUS", 6)
    monkeypatch.setattr(fsdp, "LARGE", large)
    x = np.random.default_rng(0).standard_normal((24, 48), np.float32)
    shards = P(*[None, None][:dim], "fsdp")
    gathered = on_devices(size, lambda shard: all_gather(shard, "fsdp", dim)[None], shards, P("fsdp"))(x)
    np.testing.assert_array_equal(gathered, np.broadcast_to(x, (size, 24, 48)))


def test_the_weights_of_many_tasks_are_gathered_along_rings_under_vmap(monkeypatch):
    monkeypatch.setattr(fsdp, "WHOLE_TORUS", 6)
    monkeypatch.setattr(fsdp, "LARGE", 0)
    x = np.random.default_rng(0).standard_normal((3, 24, 4), np.float32)
    of_tasks = jax.vmap(lambda shard: all_gather(shard, "fsdp", 0))
    gathered = on_devices(8, lambda shards: of_tasks(shards)[None], P(None, "fsdp"), P("fsdp"))(x)
    np.testing.assert_array_equal(gathered, np.broadcast_to(x, (8, 3, 24, 4)))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_large_axis_reduces_in_two_steps_with_the_same_results(dim, monkeypatch):
    monkeypatch.setattr(fsdp, "WHOLE_TORUS", 8)
    assert fsdp.steps_of(8) == (2, 4) and fsdp.steps_of(64) == (8, 8) and fsdp.steps_of(7) == (1, 7)
    x = np.random.default_rng(0).standard_normal((8, 24, 16), np.float32)
    assert_close(reduced(x, dim), x.sum(axis=0))


def test_the_gradient_of_an_all_gather_is_reduce_scattered():
    """Each device uses the whole weight in its own way: the gradient of a shard is the sum over their uses."""
    rng = np.random.default_rng(0)
    w, factors = rng.standard_normal((3, 8), np.float32), rng.standard_normal((4, 3, 8), np.float32)

    def gradient(shard, factor):
        return jax.grad(lambda shard: jnp.sum(factor[0] * all_gather(shard, "fsdp", 1) ** 2))(shard)

    actual = on_devices(4, gradient, (P(None, "fsdp"), P("fsdp")), P(None, "fsdp"))(w, factors)
    assert_close(actual, 2 * w * factors.sum(axis=0))


@pytest.mark.parametrize(
    "gather", [all_gather_params, functools.partial(all_gather_params_ordered, order=("a", "b"))],
    ids=["any order", "ordered"],
)  # fmt: skip
def test_bfloat16_gradients_summed_in_float32_are_rounded_once(gather):
    """Of whole numbers below 256, which bfloat16 holds and float32 sums exactly; nor does it hold their sums."""
    parts = {name: np.random.default_rng(0).integers(129, 256, (8, 16, 4)).astype(np.float32) for name in ("a", "b")}
    axes = dict.fromkeys(parts, ("embed", "mlp"))

    def gradient(parts, reduce_dtype):
        parts = jax.tree.map(lambda part: part[0].astype(jnp.bfloat16), parts)
        shards = jax.tree.map(lambda part: jnp.zeros((2, 4), jnp.bfloat16), parts)
        with nnx.logical_axis_rules(shard_map_rules()), grad_reduce_dtype(reduce_dtype):
            return jax.vjp(lambda shards: gather(shards, axes, jnp.bfloat16), shards)[1](parts)[0]

    def summed(reduce_dtype):
        ours = on_devices(8, functools.partial(gradient, reduce_dtype=reduce_dtype), (P("fsdp"),), P("fsdp"))(parts)
        assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(ours))
        return ours

    exact = jax.tree.map(lambda part: part.sum(axis=0).astype(jnp.bfloat16), parts)
    jax.tree.map(np.testing.assert_array_equal, summed(jnp.float32), exact)
    assert not all(np.array_equal(ours, exact[name]) for name, ours in summed(None).items())


def test_only_sharded_weights_are_gathered_and_cast():
    weights = {"split": np.ones((4, 3)), "scale": np.ones(8, np.float32)}
    axes = {"split": ("embed", "mlp"), "scale": ("norm",)}

    def gathered(weights):
        return all_gather_params(weights, axes, jnp.bfloat16)

    specs = {"split": P("fsdp"), "scale": P()}
    replicated = dict.fromkeys(specs, P())
    inside = on_devices(4, gathered, (specs,), replicated)(weights)
    assert {name: (x.shape, x.dtype) for name, x in inside.items()} == {
        "split": ((4, 3), jnp.bfloat16),
        "scale": ((8,), jnp.float32),
    }
    assert gathered(weights) is weights  # outside, the compiler gathers them


def test_a_dimension_that_two_axes_shard_is_gathered_and_reduced_in_its_order():
    weights, axes = {"layer": np.arange(8, dtype=np.float32).reshape(4, 2)}, {"layer": ("embed", "mlp")}
    mesh = make_mesh({"data": 1, "fsdp": 2, "expert": 2, "context": 1, "model": 1}, jax.devices()[:4])
    shards = {"layer": P(("fsdp", "expert"))}

    def gathered(weights, slope):
        whole, pull = jax.vjp(lambda w: all_gather_params_ordered(w, axes, jnp.float32, ("layer",)), weights)
        return all_gather_params(weights, axes, jnp.float32), whole, *pull(slope)

    with mesh_context(mesh):
        out_specs = {"layer": P()}, {"layer": P()}, shards
        mapped = jax.shard_map(gathered, in_specs=(shards, {"layer": P()}), out_specs=out_specs, check_vma=False)
        first, second, gradient = jax.jit(mapped)(weights, weights)
    assert_close((first, second), (weights, weights))
    assert_close(gradient, {"layer": 4 * weights["layer"]})


def test_an_activation_inside_a_shard_map_has_no_layout_to_constrain():
    x = np.ones((4, 6, 2), np.float32)
    part = on_devices(4, lambda x: constrain(x, "batch", "length", "act_embed"), P("fsdp"), P("fsdp"))(x)
    assert_close(part, x)


@pytest.mark.parametrize("quantization", ["none", *QUANTIZED])
def test_a_product_has_the_same_gradients_where_the_weights_comes_first(quantization):
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape, np.float32) for shape in ((4, 3, 5), (5, 2, 7), (4, 3, 2, 7)))

    def pulled(x, w, dy):
        return jax.vjp(functools.partial(einsum, "BTD,DNH->BTNH", quantization=quantization), x, w)[1](dy)

    rows = P(None, "fsdp")
    inside = on_devices(3, lambda x, w, dy: (pulled(x, w, dy)[0], jax.lax.psum(pulled(x, w, dy)[1], "fsdp")),
                        (rows, P(), rows), (rows, P()))  # fmt: skip
    assert_close(inside(x, w, dy), pulled(x, w, dy))


def test_rules_for_sharded_and_for_gathered_weights():
    rules = dict(rules_without(BATCH_AXES))
    assert rules["embed"] == ("fsdp", "context", "expert") and rules["batch"] == () and rules["mlp"] == "model"
    rules = dict(shard_map_rules())
    assert rules["embed"] == ("fsdp", "context", "expert") and rules["vocab"] == "model"
    assert rules["batch"] is rules["mlp"] is rules["heads"] is rules["kv_heads"] is None
    rules = dict(shard_map_rules(gathered_params=True))
    assert rules["embed"] is rules["vocab"] is rules["mlp"] is None and rules["stream"] == "model"
