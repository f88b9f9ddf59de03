# SPDX-License-Identifier: Apache-2.0
"""Activations of a decoder by name: they are those that it computes, and a replacement reaches what comes after it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from layers import taps
from layers.axes import declared_axes
from parallelism import axis_rules
from parallelism.mesh import make_mesh, mesh_context
from tests.support import assert_close, make_model, model_config, packed_batch, relative_error

L, B, T, D, V, LAYER, POSITION = 3, 8, 12, 20, 40, 1, 5
N, H, HEAD = 6, 8, 4
HOW = {  # whether layers are scanned, and the model's configuration
    "scanned": (True, {}),
    "unrolled": (False, {}),
    "remat": (True, {"remat": "full"}),
    "unrolled remat": (False, {"remat": "full"}),
    "kinds": (True, {"remat": "attended", "sliding_window": 3, "global_every": 2}),
}
EIGHT = {"dcn_data": 1, "data": 2, "fsdp": 2, "context": 1, "expert": 1, "model": 2}
BATCH = packed_batch([[T]] * B, T, V)


@functools.cache
def model(how: str):
    """Return (graph, params); all have the same weights."""
    scan, changes = HOW[how]
    return make_model(model_config(vocab_size=V, **changes), scan=scan)


def run(graph, params, batch=BATCH):
    """Return the logits."""
    stream, _ = (merged := nnx.merge(graph, params))(batch["tokens"], batch["positions"], batch["segments"])
    return merged.logits(stream)


@functools.partial(jax.jit, static_argnums=0)
def recorded(graph, params):
    with taps.record("embed", "heads", "attention", "mlp", "block") as found:
        logits = run(graph, params)
    return logits, found


def patched(x, layer):
    """Return the activation with another value at one position of one layer."""
    return jnp.where(layer == LAYER, x.at[:, POSITION].set(0.5), x)


@pytest.mark.parametrize("how", HOW)
def test_what_is_recorded_adds_up_to_the_residual_stream_of_each_layer(how):
    """The stream after a block is that before it, and what attention and MLP add."""
    logits, found = recorded(*model(how))
    assert found["block"].shape == found["mlp"].shape == found["attention"].shape == (L, B, T, D)
    entering = np.concatenate([found["embed"][None], found["block"][:-1]])
    assert_close(found["block"], entering + found["attention"] + found["mlp"])
    np.testing.assert_array_equal(logits, jax.jit(run, static_argnums=0)(*model(how)))
    final = nnx.merge(*model(how))
    assert_close(final.logits(final.norm(found["block"][-1])), logits)


@pytest.mark.parametrize("how", HOW)
def test_what_attention_adds_is_the_sum_of_its_heads_through_the_output_projection(how):
    graph, params = model(how)
    found = recorded(graph, params)[1]
    assert found["heads"].shape == (L, B, T, N, H)
    out_LNHD = params["stack"]["blocks"]["attention"]["out"]
    assert_close(np.einsum("LBTNH,LNHD->LBTD", found["heads"], out_LNHD), found["attention"])


def test_a_head_that_is_replaced_by_zeros_adds_nothing_and_the_other_heads_stay():
    graph, params = model("remat")

    def without(x, layer):
        return jnp.where(layer == LAYER, x.at[..., HEAD, :].set(0), x)

    @jax.jit
    def ablated(params):
        with taps.replace("heads", without), taps.record("heads", "attention") as found:
            run(graph, params)
        return found

    before, after = recorded(graph, params)[1], ablated(params)
    others = np.delete(np.asarray(before["heads"])[LAYER], HEAD, axis=-2)
    assert_close(np.delete(np.asarray(after["heads"])[LAYER], HEAD, axis=-2), others)
    kept_NHD = np.delete(params["stack"]["blocks"]["attention"]["out"][LAYER], HEAD, axis=0)
    assert_close(after["attention"][LAYER], np.einsum("BTNH,NHD->BTD", others, kept_NHD))


def test_scanned_unrolled_and_rematerialised_layers_record_the_same():
    expected = recorded(*model("scanned"))
    for how in ("unrolled", "remat", "unrolled remat"):
        assert_close(recorded(*model(how)), expected)


@pytest.mark.parametrize("how", HOW)
def test_a_measure_is_the_sum_over_tokens_of_what_is_recorded(how):
    @functools.partial(jax.jit, static_argnums=0)
    def both(graph, params):
        with taps.record("mlp_hidden") as found:
            run(graph, params)
        axes = ("layers", "mlp")
        measures = {
            "size": taps.Measure("mlp_hidden", jnp.abs, axes), "mean": taps.Measure("mlp_hidden", lambda h: h, axes)
        }  # fmt: skip
        with taps.measure(measures) as measured:
            run(graph, params)
        return found["mlp_hidden"], measured

    hidden_LBTF, measured = both(*model(how))
    assert_close(measured["size"][0], jnp.abs(hidden_LBTF).sum(axis=(1, 2)))
    assert_close(measured["mean"][0], hidden_LBTF.sum(axis=(1, 2)))
    np.testing.assert_array_equal(measured["size"][1], np.full((L, 1), B * T))


@pytest.mark.parametrize("how", HOW)
def test_nothing_to_measure_leaves_the_program_as_it_is(how):
    """The step always opens the context; a run without a transform that measures must not pay for it."""

    def opened(params):
        with taps.measure({}):
            return run(graph, params)

    graph, params = model(how)
    plain = jax.make_jaxpr(lambda params: run(graph, params))(params)
    assert str(jax.make_jaxpr(opened)(params)) == str(plain)


def test_a_measure_of_no_activation_is_refused():
    opened = taps.measure({"a": taps.Measure("hiden", jnp.abs, ())})
    with pytest.raises(ValueError, match="the model computed no activation"), opened:
        pass


@pytest.mark.parametrize("how", HOW)
def test_a_replacement_changes_only_later_layers_and_positions(how):
    @functools.partial(jax.jit, static_argnums=0)
    def replaced(graph, params):
        with taps.replace("attention", patched), taps.record("attention", "block") as found:
            logits = run(graph, params)
        return logits, found

    (before_logits, before), (logits, after) = recorded(*model(how)), replaced(*model(how))
    assert (np.asarray(after["attention"])[LAYER, :, POSITION] == 0.5).all()
    changed = (np.asarray(after["block"]) != np.asarray(before["block"])).any(-1).all(1)
    assert not changed[:LAYER].any() and not changed[:, :POSITION].any()
    assert changed[LAYER:, POSITION].all() and not changed[LAYER, POSITION + 1 :].any()
    assert changed[LAYER + 1 :, POSITION + 1 :].any()
    np.testing.assert_array_equal(logits[:, :POSITION], before_logits[:, :POSITION])
    assert relative_error(logits[:, POSITION:], before_logits[:, POSITION:]) > 1e-3


def test_a_recorded_activation_restores_the_output_of_another_input():
    """This is causal tracing: a clean stream, put into every position after one layer, makes the logits clean."""
    other = BATCH | {"tokens": (BATCH["tokens"] + 7) % V}
    graph, params = model("remat")
    clean, found = recorded(graph, params)

    @jax.jit
    def restored(params, stream):
        with taps.replace("block", lambda x, layer: jnp.where(layer == LAYER, stream, x)):
            return run(graph, params, other)

    assert_close(restored(params, found["block"][LAYER]), clean)
    assert relative_error(jax.jit(run, static_argnums=0)(graph, params, other), clean) > 0.1


@pytest.mark.parametrize("how", ["remat", "unrolled"])
def test_gradients_flow_through_a_replacement(how):
    graph, params = model(how)

    def loss(value):
        def put(x, layer):
            return jnp.where(layer == LAYER, x.at[:, POSITION].set(value), x)

        with taps.replace("attention", put), taps.replace("embed", lambda x, layer: x.at[:, POSITION].add(value)):
            return jnp.sum(jnp.sin(run(graph, params)))

    gradient, above, below = jax.jit(lambda v, step: (jax.grad(loss)(v), loss(v + step), loss(v - step)))(0.3, 1e-2)
    assert abs(gradient) > 1e-2 and abs(gradient - (above - below) / 2e-2) < 2e-2 * abs(gradient)


def test_gradients_flow_through_what_is_recorded():
    """A penalty of activations, and its gradient by the weights, with and without rematerialisation."""

    def penalty(params, graph):
        with taps.record("mlp") as found:
            run(graph, params)
        return jnp.sum(found["mlp"] ** 2)

    gradient = jax.jit(jax.grad(penalty), static_argnums=1)
    expected, actual = (gradient(params, graph) for graph, params in (model("unrolled"), model("remat")))
    assert_close(actual, expected)
    assert np.abs(expected["stack"]["blocks"]["mlp"]["down"]).max() > 0


def doubled(graph, params, batch):
    """Return the recorded activations of a model whose second attention has other heads and twice the output."""
    with (
        taps.replace("attention", lambda x, layer: jnp.where(layer == LAYER, 2 * x, x)),
        taps.replace("heads", lambda x, layer: jnp.where(layer == LAYER, x - 1, x)),
        taps.record("attention", "block") as found,
    ):
        nnx.merge(graph, params)(batch["tokens"], batch["positions"], batch["segments"])
    return found


def test_eight_devices_record_and_replace_as_one_does():
    """With global arrays, and inside a `shard_map` as in a training step, where each device has its own part."""
    graph, params = model("remat")
    of_one = functools.partial(doubled, graph)
    expected = jax.jit(of_one)(params, BATCH)
    with mesh_context(make_mesh(EIGHT)) as mesh:
        batch = jax.device_put(BATCH, axis_rules.batch_sharding(mesh, 2))
        assert_close(jax.jit(of_one)(params, batch), expected)
        declared = declared_axes(nnx.state(nnx.merge(graph, params)))
        specs = jax.tree.map(lambda sharding: sharding.spec, axis_rules.weight_shardings(declared, mesh))
        parts = PartitionSpec(axis_rules.BATCH_AXES, "model")

        def of_device(params, batch):
            with nnx.logical_axis_rules(axis_rules.shard_map_rules()):
                return of_one(params, batch)

        mapped = jax.shard_map(
            of_device, in_specs=(specs, parts), out_specs=PartitionSpec(None, *parts), check_vma=False
        )
        assert_close(jax.jit(mapped)(params, batch), expected)


@pytest.mark.parametrize("opened", [taps.record("atention"), taps.replace("atention", patched)])
def test_an_unknown_name_is_an_error(opened):
    def misspelt():
        with taps.replace("mlp", patched), opened:
            run(*model("scanned"))

    with pytest.raises(ValueError, match=r"the model computed no activation .*'atention'"):
        jax.eval_shape(misspelt)


def test_a_second_call_in_one_context_is_an_error():
    def twice():
        with taps.record("block"):
            run(*model("scanned"))
            run(*model("scanned"))

    with pytest.raises(ValueError, match="'block' twice; open one context for each call"):
        jax.eval_shape(twice)


@pytest.mark.parametrize("opened", [taps.record("block"), taps.replace("embed", patched), taps.replace("mlp", patched)])
def test_a_context_around_a_jitted_call_is_an_error_not_a_leak(opened):
    graph, params = model("unrolled")
    with pytest.raises(RuntimeError, match="open it inside the function that is jitted"), opened:
        jax.jit(lambda params: run(graph, params))(params)


def test_a_function_that_was_jitted_earlier_records_nothing_and_says_so():
    graph, params = model("unrolled")
    jitted = jax.jit(lambda params: run(graph, params))
    jitted(params)
    for opened in (taps.record("block"), taps.replace("mlp", patched)):
        with pytest.raises(ValueError, match="functions that were jitted earlier are not traced again"), opened:
            jitted(params)


@pytest.mark.parametrize("wrong", [lambda x, layer: x[:, :1], lambda x, layer: x.astype(jnp.bfloat16)])
def test_a_replacement_of_another_shape_or_type_is_an_error(wrong):
    def replaced():
        with taps.replace("mlp", wrong):
            run(*model("scanned"))

    with pytest.raises(ValueError, match=r"'mlp' returns .*; it must return float32\[8, 12, 20\]"):
        jax.eval_shape(replaced)


def test_closed_contexts_leave_the_program_as_it_was():
    graph, params = model("remat")

    def lowered():
        return jax.jit(lambda params: run(graph, params)).lower(params).as_text()

    before = lowered()
    recorded(graph, params)
    assert lowered() == before
