# SPDX-License-Identifier: Apache-2.0
"""One step is the same step on any mesh; and everything lies where the axis rules say."""

import types

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from configs import base
from configs.base import MESH_AXES
from configs.errors import ConfigError
from core import assembly
from layers.axes import constrain
from parallelism.axis_rules import RULES
from parallelism.mesh import make_mesh, mesh_context
from tests.one_step import BATCH, LENGTH, batch, gradients_and_scalars, placed, small_config
from tests.support import assert_close, relative_error

MESHES = [  # two slices are below, fsdp alone in tests/training/test_shard_map.py
    {"model": 4}, {"data": 4, "expert": 2}, {"data": 2, "fsdp": 2, "model": 2},
    {"fsdp": 2, "context": 2, "model": 2}, {"data": 2, "context": 2, "expert": 2},
]  # fmt: skip
INT8 = (("quantization", "int8"),)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(f"{axis}{size}" for axis, size in mesh.items()))
def test_loss_and_every_gradient_are_those_of_one_device(mesh):
    actual = gradients_and_scalars(**mesh)
    assert_close(actual, gradients_and_scalars())
    assert all(np.abs(gradient).max() > 0 for gradient in jax.tree.leaves(actual[0]))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 2, "context": 2, "model": 2}], ids=["in shards", "compiled"])
def test_quantised_gradients_are_those_of_one_device(mesh):
    """Except for a few operands in a thousand, which another order of sums rounds to the next of 255 steps."""
    (actual, _), (expected, _) = gradients_and_scalars(of_model=INT8, **mesh), gradients_and_scalars(of_model=INT8)
    plain, _ = gradients_and_scalars()
    near = jax.tree.leaves(jax.tree.map(relative_error, actual, expected))
    far = jax.tree.leaves(jax.tree.map(relative_error, expected, plain))
    assert max(near) < 1e-3 < min(far), (near, far)


@pytest.mark.slow
def test_devices_that_share_heads_round_what_they_sum_each_in_scales_of_its_own():
    """Other roundings than on one device, and no coarser: as far from it as that is from products in float32."""
    actual, _ = gradients_and_scalars(of_model=INT8, data=2, fsdp=2, model=2)
    plain, _ = gradients_and_scalars()
    alone = jax.tree.map(relative_error, gradients_and_scalars(of_model=INT8)[0], plain)
    shared = jax.tree.map(relative_error, actual, plain)
    assert max(jax.tree.leaves(shared)) < 1.5 * max(jax.tree.leaves(alone)), (shared, alone)


@pytest.mark.parametrize(("num_parameters", "axes"), [(10**6, ("dcn_data", "fsdp")), (10**9, ("dcn_data",))])
def test_gradients_cross_the_network_between_slices_once_a_step(num_parameters, axes):
    built = types.SimpleNamespace(num_trained=num_parameters)
    assert tuple(assembly._reduce_once_axes(small_config(dcn_data=2, fsdp=4), built)) == axes


def test_microbatches_on_slices_add_up_to_the_whole_batch():
    assert_close(gradients_and_scalars(num_microbatches=2, dcn_data=2, fsdp=4), gradients_and_scalars())


def test_the_order_of_the_axes_is_that_of_the_mesh():
    config = small_config(data=2, model=2, fsdp=2)
    config.layout.axis_order = "dcn_data,data,model,fsdp,context,expert"
    mesh = assembly.assemble(config).mesh
    assert mesh.axis_names == ("dcn_data", "data", "model", "fsdp", "context", "expert")
    assert [device.id for device in mesh.devices[0, 0, 1].flat] == [2, 3]  # fsdp changes faster than model


WHERE = {  # of the weights, by the rules, written out
    ("embed", "embedding"): P("model", ("fsdp", "context")),
    ("head", "kernel"): P(("fsdp", "context"), "model"),
    ("norm", "scale"): P(None),
    ("attention", "query"): P(None, ("fsdp", "context"), "model", None),
    ("attention", "key"): P(None, ("fsdp", "context"), "model", None),
    ("attention", "value"): P(None, ("fsdp", "context"), "model", None),
    ("attention", "out"): P(None, "model", None, ("fsdp", "context")),
    ("attention_norm", "scale"): P(None, None),
    ("mlp_norm", "scale"): P(None, None),
    ("mlp", "gate"): P(None, ("fsdp", "context"), "model"),
    ("mlp", "up"): P(None, ("fsdp", "context"), "model"),
    ("mlp", "down"): P(None, "model", ("fsdp", "context")),
}


@pytest.fixture(scope="module")
def trained():
    """Return (run, initial weights, state) after a step of AdamW on a mesh of three axes."""
    run = assembly.assemble(small_config(fsdp=2, context=2, model=2))
    with mesh_context(run.mesh):
        state = run.init()
        initial = jax.device_get(state.params)
        state, _ = run.train_step(state, placed(batch(), run.abstract_batch))
    return run, initial, state


def test_weights_begin_the_same_on_any_mesh(trained):
    run = assembly.assemble(small_config(), devices=jax.devices()[:1])
    with mesh_context(run.mesh):
        assert_close(trained[1], run.init().params)


def test_parameters_and_moments_lie_where_the_rules_say(trained):
    run, _, state = trained
    adam = optax.tree.get(state.optimizer, "ScaleByAdamState")
    checked = set()
    for tree in (state.params, adam.mu, adam.nu):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = path[-2].key, path[-1].key
            assert leaf.sharding.is_equivalent_to(NamedSharding(run.mesh, WHERE[name]), leaf.ndim), (
                name,
                leaf.sharding,
            )
            checked.add(name)
    assert checked == WHERE.keys()
    assert adam.count.sharding.is_fully_replicated and state.step.sharding.is_fully_replicated


def test_a_trained_state_is_described_by_the_abstract_state(trained):
    """What the step returns it takes again, and a checkpoint of it restores onto `abstract_state`."""
    run, _, state = trained
    for actual, abstract in zip(jax.tree.leaves(state), jax.tree.leaves(run.abstract_state), strict=True):
        assert (actual.shape, actual.dtype) == (abstract.shape, abstract.dtype)
        assert actual.sharding.is_equivalent_to(abstract.sharding, actual.ndim)


def test_every_weight_but_the_norms_is_split_over_every_axis_that_holds_weights(trained):
    for path, leaf in jax.tree_util.tree_leaves_with_path(trained[2].params):
        parts = leaf.size // leaf.addressable_shards[0].data.size
        assert parts == (1 if path[-1].key == "scale" else 8), jax.tree_util.keystr(path)


def test_batch_and_activations_are_split_over_batch_and_length(trained):
    run, _, state = trained
    on_devices = placed(batch(), run.abstract_batch)
    assert on_devices["tokens"].addressable_shards[0].data.shape == (BATCH // 2, LENGTH // 2)

    @jax.jit
    def stream(params, batch):
        return run.model(params)(batch["tokens"], batch["positions"], batch["segments"])[0]

    with mesh_context(run.mesh):
        shard = stream(state.params, on_devices).addressable_shards[0].data
    assert shard.shape == (BATCH // 2, LENGTH // 2, 40)


@pytest.mark.parametrize(
    ("axes", "shard"),
    [
        (("batch", "length", "act_embed"), (2, 12, 40)),
        (("batch", "length", "heads", "head_dim"), (2, 12, 4, 6)),
        (("batch", "key_length", "kv_heads", "head_dim"), (2, 24, 2, 6)),
        (("batch", "length", "mlp"), (2, 12, 28)),
        (("vocab", "act_embed"), (34, 40)),
    ],
)
def test_an_activation_is_constrained_by_the_names_of_its_axes(axes, shard):
    sizes = dict(batch=4, length=24, key_length=24, act_embed=40, heads=8, kv_heads=4, head_dim=6, mlp=56, vocab=68)
    with mesh_context(make_mesh(dict(zip(MESH_AXES, (1, 1, 2, 2, 1, 2), strict=True)))):
        x = jax.jit(lambda: constrain(jax.numpy.zeros([sizes[name] for name in axes]), *axes))()
    assert x.addressable_shards[0].data.shape == shard


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_kv_heads": 2}, ("stack.blocks.attention.key", "has 2", "'kv_heads'", "mesh.model=4")),
        ({"mlp_dim": 54}, ("stack.blocks.mlp.", "has 54", "'mlp'", "mesh.model=4")),
        ({"embed_dim": 41}, ("has 41", "'embed'", "mesh.fsdp=2")),
    ],
)
def test_a_mesh_axis_that_does_not_divide_is_an_error_and_never_a_silent_copy(changes, words):
    config = small_config(fsdp=2, model=4)
    config.model.update(changes)
    with pytest.raises(ConfigError) as caught:
        assembly.assemble(config)
    assert all(word in str(caught.value) for word in words), caught.value


def test_every_axis_of_the_mesh_is_used_by_a_rule():
    targets = {target for _, rule in RULES if rule for target in ([rule] if isinstance(rule, str) else rule)}
    assert targets == set(MESH_AXES) == set(base.get_config().mesh)
