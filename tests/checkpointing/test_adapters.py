# SPDX-License-Identifier: Apache-2.0
"""A step that trains adapters computes on any mesh what it does on one device, and no gradient of other weights."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from checkpointing import adapters
from core import assembly
from parallelism.mesh import mesh_context
from settings.validation import validate
from tests.one_step import batch, placed, small_config
from tests.support import assert_close, random_weights

ALL = "query,key,value,out,gate,up,down"
EXPERTS = (("num_experts", 4), ("num_layers", 1))


def adapted(targets: str, of_model: tuple = (), num_microbatches: int = 1, **mesh):
    config = small_config(**mesh)
    config.model.update(dict(of_model))
    config.train.update(gradient_accumulation=num_microbatches, init_from="a run")  # its weights come from the test
    config.optimizer.update(name="sgd", clip_norm=0.0)
    config.lora.update(rank=3, alpha=6.0, targets=targets)
    validate(config, math.prod(config.mesh.values()))
    return config


def assembled(config):
    return assembly.assemble(config, devices=jax.devices()[: math.prod(config.mesh.values())])


@functools.cache
def gradients_and_scalars(targets: str, of_model: tuple = (), num_microbatches: int = 1, **mesh):
    """Return what one step computes; with large adapters scores would be too steep to compare."""
    run = assembled(adapted(targets, of_model, num_microbatches, **mesh))
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), run.abstract_state)
    state = dataclasses.replace(state, params=random_weights(state.params, spread=0.1))
    frozen = {role: random_weights(params, seed=1) for role, params in run.abstract_frozen.items()}
    abstract = run.abstract_state, run.abstract_batch, run.abstract_frozen
    with mesh_context(run.mesh):
        after, scalars, gradients = run.train_step_with_grads(*map(placed, (state, batch(), frozen), abstract))
    assert jax.tree.structure(after.params) == jax.tree.structure(state.params) == jax.tree.structure(gradients)
    return jax.device_get((gradients, scalars))


@pytest.mark.parametrize(
    ("targets", "of_model", "num_microbatches", "mesh"),
    [
        pytest.param(ALL, (), 2, {"fsdp": 2, "model": 2}, marks=pytest.mark.slow),
        (ALL, (("remat", "full"),), 2, {"data": 2, "context": 2}),
        pytest.param("query,out", EXPERTS, 1, {"expert": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_on_a_mesh_adapters_have_the_gradients_of_one_device(targets, of_model, num_microbatches, mesh):
    found = gradients_and_scalars(targets, of_model, num_microbatches, **mesh)
    assert_close(found, gradients_and_scalars(targets, EXPERTS if of_model is EXPERTS else ()))


def test_merged_with_what_they_are_beside_they_compute_the_same():
    run, plain = assembled(adapted(ALL)), assembled(small_config())
    params = random_weights(run.abstract_state.params, spread=0.1)
    frozen = random_weights(run.abstract_frozen["base"], seed=1)
    state = dataclasses.replace(run.abstract_state, params=params)
    merged = adapters.merge(frozen, params, 2.0)  # alpha / rank
    with mesh_context(run.mesh):
        found, wanted, without = (
            each.eval_step(weights, batch())["loss"]
            for each, weights in ((run, run.eval_params(state, {"base": frozen})), (plain, merged), (plain, frozen))
        )
    assert_close(found, wanted)
    assert abs(without[0] - wanted[0]) > 1e-3 * wanted[0]


def test_nothing_is_computed_nor_kept_for_weights_that_stay():
    """A product has three of its size in a full step and two here; those of attention's scores are the same in both."""
    run = assembled(adapted("query,value", fsdp=2))
    of_adapters = sum(leaf.size for leaf in jax.tree.leaves(run.abstract_state.params))
    assert of_adapters == run.models.num_trained == 2 * 3 * (40 + 8 * 6 + 40 + 4 * 6)
    assert sum(leaf.size for leaf in jax.tree.leaves(run.abstract_state.optimizer)) == of_adapters + 1
    full = small_config(fsdp=2)
    full.optimizer.update(run.config.optimizer)
    full = assembled(full)
    assert run.models.num_parameters == full.models.num_parameters + of_adapters
    flops = [each.compile().cost_analysis()["flops"] for each in (run, full)]
    assert flops[0] < 0.8 * flops[1]
    assert run.flops_per_token < 0.8 * full.flops_per_token


def test_what_is_beside_adapters_has_the_type_of_its_products():
    run = assembled(adapted("query", (("dtype", "bfloat16"),), fsdp=8))
    frozen = run.abstract_frozen["base"]
    types = {name: leaf.dtype.name for name, leaf in flatten_dict(frozen, sep="/").items()}
    assert {name for name, kind in types.items() if kind != "bfloat16"} == {name for name in types if "norm" in name}
    query = frozen["stack"]["blocks"]["attention"]["query"]
    assert query.size == 8 * math.prod(query.sharding.shard_shape(query.shape))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(run.abstract_state.params)} == {"float32"}
