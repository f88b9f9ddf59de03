# SPDX-License-Identifier: Apache-2.0
"""A decoder with experts is the same model on every mesh, in microbatches, in a loop, and token by token."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from core import assembly, layout_proof
from objectives.language_modeling import LanguageModeling
from parallelism.mesh import mesh_context
from tests.one_step import batch, placed, small_config
from tests.support import (
    assert_close,
    forward,
    make_model,
    model_config,
    packed_batch,
    random_weights,
    relative_error,
)  # fmt: skip
from training.step import Graphs, make_gradient

E, D, F = 8, 40, 28
MODEL = (("num_experts", E), ("experts_per_token", 3), ("shared_experts", 1), ("mlp_dim", F))
MESH = {"fsdp": 2, "expert": 4}


@functools.cache
def assembled(num_devices: int, **mesh):
    """Return (run, its compiled step)."""
    config = small_config(**mesh)
    config.model.update(dict(MODEL))
    config.train.update(balance_loss=0.01, router_z_loss=0.001)
    config.optimizer.update(name="sgd", clip_norm=0.0)
    run = assembly.assemble(config, devices=jax.devices()[:num_devices])
    with mesh_context(run.mesh):
        return run, run.train_step_with_grads.lower(run.abstract_state, run.abstract_batch).compile()


def layout(run, step) -> layout_proof.Layout:
    shardings = jax.tree.map(lambda x: x.sharding, (run.abstract_state, run.abstract_batch))
    return layout_proof.Layout(run.mesh, step, *shardings)


@functools.cache
def after(steps: int):
    """Return (state, scalars, gradients) of one device after some steps on one batch, from random weights."""
    run, step = assembled(1)
    if not steps:
        state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), run.abstract_state)
        return dataclasses.replace(state, params=random_weights(state.params)), None, None
    inputs = placed((after(steps - 1)[0], batch()), (run.abstract_state, run.abstract_batch))
    with mesh_context(run.mesh):
        return jax.device_get(step(*inputs))


@pytest.mark.slow
def test_a_layout_with_experts_computes_what_one_device_does():
    """Loss, loads, every gradient, the update of weights and of the bias, after steps that give it moments."""
    assert layout_proof.differences(layout(*assembled(1)), layout(*assembled(8, **MESH)), after(2)[0], batch()) == []


def test_a_group_of_devices_does_not_balance_its_experts_by_itself():
    """In microbatches whose length mesh.model does not divide, which GSPMD computes. The tolerance is float32's."""
    found = []
    for mesh in ({}, {"data": 2, "model": 2}):
        config = small_config(**mesh)
        config.model.update(dict(MODEL), num_layers=1)
        config.train.update(balance_loss=0.1, gradient_accumulation=2, sequence_length=15)
        run = assembly.assemble(config, devices=jax.devices()[: math.prod(mesh.values())])
        shapes = (run.abstract_state, run.abstract_batch)
        state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), run.abstract_state)
        state = dataclasses.replace(state, params=random_weights(state.params))
        rows = {name: array[:, :15] for name, array in batch().items()}
        with mesh_context(run.mesh):
            _, scalars, gradients = jax.device_get(run.train_step_with_grads(*placed((state, rows), shapes)))
        found.append((gradients, {name: scalars[name] for name in ("loss", "gradient_norm")}))
    assert_close(*found)


def test_the_program_exchanges_tokens_and_gathers_no_experts():
    program = assembled(8, **MESH)[1].as_text()
    gathered = [eval(f"[{dims}]") for dims in re.findall(r"f32\[([\d,]+)\]\S* all-gather\(", program)]
    of_experts = [dims for dims in gathered if len(dims) >= 3 and {D, F} <= set(dims)]
    assert "all-to-all(" in program and of_experts
    assert all(np.prod(dims) == E // MESH["expert"] * D * F for dims in of_experts), of_experts  # over fsdp alone


def test_the_bias_goes_a_step_against_the_load_and_is_no_part_of_the_gradients_norm():
    (before, *_), (now, scalars, gradients) = after(0), after(1)
    old, new, violation = (tree["stack"]["blocks"]["mlp"]["bias"] for tree in (before.params, now.params, gradients))
    np.testing.assert_allclose(new - old, -1e-3 * np.sign(violation), atol=1e-7)  # rounding of numbers near 1
    gradients["stack"]["blocks"]["mlp"].pop("bias")
    norm = np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in jax.tree.leaves(gradients)))
    assert abs(scalars["gradient_norm"] - norm) < 1e-5 * norm


@functools.cache
def small_model(scan: bool):
    config = model_config(num_experts=4, experts_per_token=2, shared_experts=1)
    return make_model(config, scan=scan)


@pytest.mark.slow
@pytest.mark.parametrize("balance_loss", [0.0, 0.5])
def test_microbatches_add_up_to_the_whole_batch(balance_loss):
    """Except for the balance loss, which is the sum of those of the microbatches. Experts have room for all tokens."""
    graph, params = make_model(model_config(num_experts=4, experts_per_token=2, expert_capacity=2.0, num_layers=1))
    documents = packed_batch([[9, 4], [5], [16], [3, 3, 3]], 16, 37)
    loss = LanguageModeling(4, 16, balance_loss=balance_loss).loss

    def gradient(num_microbatches: int, rows: slice):
        batch = {name: array[rows] for name, array in documents.items()}
        function = make_gradient(Graphs(graph, {}), loss, num_microbatches=num_microbatches)
        gradients, weight, _, scalars = jax.jit(function)(params, {}, batch, jax.random.key(0), {})
        return gradients, weight, scalars["loss"]

    cut, whole = gradient(2, slice(None)), gradient(1, slice(None))
    halves = jax.tree.map(jnp.add, gradient(1, slice(0, None, 2)), gradient(1, slice(1, None, 2)))
    assert_close(cut, halves)
    if not balance_loss:
        assert_close(cut, whole)
    else:
        router = [of[0]["stack"]["blocks"]["mlp"]["router"] for of in (cut, whole)]
        assert relative_error(*router) > 1e-3


def test_a_loop_over_layers_is_a_scan():
    documents = packed_batch([[7, 4], [5]], 12, 37)
    assert_close(forward(*small_model(False), documents), forward(*small_model(True), documents))


def test_token_by_token_with_a_cache_is_all_at_once():
    (graph, params), documents = small_model(True), packed_batch([[12], [12]], 12, 37)
    whole = forward(graph, params, documents)

    @jax.jit
    def step(cache, inputs):
        model = nnx.merge(graph, params)
        stream, cache = model(*(row[:, None] for row in inputs), cache)
        return cache, model.logits(stream)[:, 0]

    inputs = [jnp.asarray(documents[name]).T for name in ("tokens", "positions", "segments")]
    cache = nnx.merge(graph, params).empty_cache(2, 12)
    _, one_by_one = jax.lax.scan(step, cache, inputs)
    assert_close(one_by_one.swapaxes(0, 1), whole)
