# SPDX-License-Identifier: Apache-2.0
"""The mesh on which a run decodes."""

import pytest

from configs import base
from configs.errors import ConfigError
from settings import loading, together, validation
from settings.decoding import dropless, for_decoding
from tests.support import RECIPES


def of_heads(num_kv_heads: int, num_experts: int = 0):
    config = base.get_config()
    config.model.update(num_heads=32, num_kv_heads=num_kv_heads, mlp_dim=64, vocab_size=512, num_experts=num_experts)
    config.mesh.fsdp = 8
    return config


@pytest.mark.parametrize(
    ("num_kv_heads", "num_experts", "num_devices", "mesh"),
    [
        (32, 0, 16, {"model": 16}),
        (8, 0, 16, {"model": 8, "data": 2}),
        (8, 4, 8, {"model": 4, "data": 2}),
        (1, 0, 4, {"data": 4}),
        (8, 0, 3, {"data": 3}),
    ],
)
def test_heads_are_sharded_as_far_as_they_divide_and_rows_over_the_rest(num_kv_heads, num_experts, num_devices, mesh):
    config = of_heads(num_kv_heads, num_experts)
    decoding = for_decoding(config, num_devices)
    assert {axis: size for axis, size in decoding.mesh.items() if size > 1} == mesh
    assert decoding.model.layer_loop == "unroll"
    assert config.mesh.fsdp == 8, "the given configuration stays as it is"
    assert for_decoding(config, num_devices, keep_mesh=True).mesh == config.mesh


def test_a_mesh_that_shards_the_length_is_refused():
    config = of_heads(32)
    config.mesh.context = 2
    with pytest.raises(ConfigError, match=r"mesh\.context=2 shards the length, but tokens are decoded one by one"):
        for_decoding(config, 16, keep_mesh=True)


def test_any_batch_of_training_fits_a_mesh_that_decodes():
    config = of_heads(1)
    config.train.update(global_batch=6, gradient_accumulation=3, sum_dtype="bfloat16")
    validation.validate(for_decoding(config, 4), 4)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("num_devices", [1, 8])
def test_a_run_of_every_recipe_decodes_on_one_device_and_on_many(recipe, num_devices):
    """Rules that an objective has for its training stop no server: groups of answers, or tasks of one device."""
    config = loading.load(f"configs/{recipe}.py", "", {}).config
    if config.train.objective not in together.WITHOUT_TEXT:
        config.mesh.update(dict.fromkeys(config.mesh, 1))
        validation.validate(for_decoding(config, num_devices), num_devices)


def test_the_batch_of_a_long_run_stays_within_the_rules():
    """It is not trained on; a multiple of each shard would exceed the examples that a run may have."""
    config = of_heads(1)
    config.train.update(steps=300_000, global_batch=2048)
    decoded = for_decoding(config, 8)
    assert decoded.train.global_batch == 2048 and decoded.mesh.data > 1
    config.train.global_batch = 3
    assert for_decoding(config, 8).train.global_batch == 3 * decoded.mesh.data


def test_experts_drop_no_token_of_a_row_because_of_others():
    config = of_heads(8, num_experts=4)
    config.model.expert_capacity = 1.5
    assert dropless(config).model.expert_capacity == for_decoding(config, 4).model.expert_capacity == 0
    assert config.model.expert_capacity == 1.5, "the given configuration stays as it is"
