# SPDX-License-Identifier: Apache-2.0
"""A recipe scaled down for simulated devices: only sizes shrink, the mesh divides them, and what was typed holds."""

import functools
import importlib

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from configs.errors import ConfigError
from layers.axes import declared_axes
from parallelism.axis_rules import weight_shardings
from settings import loading, simulation, validation
from settings.keys import flat
from tests.support import RECIPES

SIZES = {
    "model.num_layers", "model.embed_dim", "model.num_heads", "model.num_kv_heads", "model.head_dim", "model.mlp_dim",
    "model.vocab_size", "train.global_batch", "train.sequence_length", "train.steps", "train.tokens", "train.epochs",
    "train.eval_every", "train.save_every", "optimizer.warmup_steps", "model.sliding_window", *simulation.OF_PUZZLES,
    "evaluation.every_epochs", "model.num_experts", "model.experts_per_token", "model.shared_experts", "batch.first",
    "batch.increase_step",
}  # fmt: skip
GROW = ("train.global_batch", "batch.first", "train.steps")  # to a sequence a shard; where there were epochs


def scaled(recipe: str, topology: str, **typed: str):
    """Return (configuration, {key: (old, new)}), scaled down and validated."""
    loaded = loading.load(f"configs/{recipe}.py", topology, {k.replace("__", "."): v for k, v in typed.items()})
    validation.resolve_mesh(loaded.config, loaded.topology.chips)
    changes = simulation.scale_down(loaded.config, loaded.typed)
    validation.validate(loaded.config, loaded.topology.chips)
    return loaded.config, changes


@functools.cache
def axes_of(**model) -> dict:
    """Return what the weights of a model declare; they are built abstractly."""
    config = loading.load("configs/tiny.py", "", {}).config.model
    config.update(model)
    module = importlib.import_module(f"models.{config.name}")
    return declared_axes(
        nnx.state(nnx.eval_shape(lambda: module.make(config, dtype=jnp.float32, scan=True, rngs=nnx.Rngs(0))))
    )


def check_every_weight_divides(config) -> None:
    """Lay the weights of a configuration's model out on a mesh of devices that need not exist."""
    names, sizes = zip(*config.mesh.items(), strict=True)
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    weight_shardings(axes_of(**config.model.to_dict()), mesh)


@pytest.mark.parametrize("topology", ["v4-8", "v4-16", "v4-32", "v4-64"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs_on_every_simulated_slice_and_only_sizes_shrink(recipe, topology):
    config, changes = scaled(recipe, topology)
    assert changes.keys() <= SIZES
    assert all(new <= old for key, (old, new) in changes.items() if key not in GROW)
    assert config.train.global_batch % config.mesh.fsdp == 0
    assert config.model.num_layers * config.model.embed_dim**2 < 1e5 and 0 < config.train.steps <= 200
    check_every_weight_divides(config)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs_as_it_is_on_eight_cpu_devices(recipe):
    batch = {"train.global_batch": "16"} if recipe == "char" else {}  # its own is nanoGPT's 12
    config = loading.load(f"configs/{recipe}.py", "cpu-8", batch).config
    validation.validate(config, 8)
    check_every_weight_divides(config)


@pytest.mark.parametrize(
    "mesh",
    [dict(mesh__fsdp="4", mesh__model="4"), dict(mesh__fsdp="1", mesh__model="8", mesh__context="2"),
     dict(mesh__fsdp="2", mesh__context="8"), dict(mesh__fsdp="-1", mesh__data="2", mesh__expert="2"),
     dict(mesh__fsdp="-1", mesh__dcn_data="2")],
)  # fmt: skip
def test_sizes_shrink_no_further_than_the_mesh_divides_and_the_mesh_stays(mesh):
    config, _ = scaled("llama3_8b", "v4-32", **mesh)
    for key, size in mesh.items():
        assert size in (str(config.mesh[key.removeprefix("mesh__")]), "-1")
    check_every_weight_divides(config)


@pytest.mark.parametrize(("recipe", "grouped"), [("llama3_8b", True), ("llama2_7b", False)])
@pytest.mark.parametrize("model_axis", ["1", "4", "8"])
def test_grouped_queries_stay_grouped_and_others_do_not_become_so(recipe, grouped, model_axis):
    config, _ = scaled(recipe, "v4-32", mesh__fsdp="-1", mesh__model=model_axis)
    assert (config.model.num_heads > config.model.num_kv_heads) == grouped


def test_kinds_of_layers_remat_optimizer_and_data_stay():
    before = flat(loading.load("configs/large.py", "v4-32", {}).config)
    config, changes = scaled("large", "v4-32")
    assert "model.remat" not in changes and config.model.remat == "dots"
    assert all(before[key] == value for key, value in flat(config).items() if key not in changes)
    assert changes["model.embed_dim"][0] == 1024 and changes["model.embed_dim"][1] == config.model.embed_dim


def test_local_and_global_layers_stay_both_and_the_window_stays_one():
    config = loading.load("configs/large.py", "v4-32", {}).config
    config.model.update(num_layers=26, sliding_window=1024, global_every=6)
    validation.resolve_mesh(config, 16)
    simulation.scale_down(config, {})
    validation.validate(config, 16)
    assert (config.model.num_layers, config.model.global_every) == (6, 6)
    assert 0 < config.model.sliding_window < config.train.sequence_length


def test_what_was_typed_wins():
    typed = dict(model__num_layers="3", model__mlp_dim="160", train__steps="400", train__global_batch="48")
    config, changes = scaled("large", "v4-32", **typed)
    assert (config.model.num_layers, config.model.mlp_dim) == (3, 160)
    assert (config.train.steps, config.train.global_batch) == (400, 48)
    assert not {"model.num_layers", "model.mlp_dim", "train.steps", "train.global_batch"} & changes.keys()
    assert scaled("large", "v4-32", train__tokens="5000")[0].train.tokens == 5000


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (dict(model__num_heads="6", mesh__fsdp="4", mesh__model="4"), "model.num_heads=6 is not a multiple of 4"),
        (dict(model__vocab_size="510", mesh__fsdp="4", mesh__model="4"), "model.vocab_size=510 is not a multiple of 4"),
        (dict(model__embed_dim="72"), "model.embed_dim=72 is not a multiple of 16"),
        (dict(train__global_batch="20"), "train.global_batch=20 is not a multiple of 16"),
        (
            dict(train__sequence_length="30", mesh__fsdp="4", mesh__context="4"),
            "sequence_length=30 is not a multiple of 4",
        ),
    ],
)
def test_a_typed_size_that_the_mesh_does_not_divide_is_an_error(typed, words):
    with pytest.raises(ConfigError, match=words):
        scaled("large", "v4-32", **typed)


def test_a_length_that_is_the_size_of_an_input_or_a_task_is_kept():
    """Of an image of 784 pixels, 64 are another input; a task of 64 examples has no query after a support of 100."""
    for recipe, keys in (("digits", {}), ("meta_sinusoid", {"support": 100})):
        config = loading.load(f"configs/{recipe}.py", "v4-8", {}).config
        config.train.sequence_length = config.model.max_length = 784
        config.meta.update(keys)
        simulation.scale_down(config, {})
        assert config.train.sequence_length == 784
