# SPDX-License-Identifier: Apache-2.0
"""Which mesh each step is on by `layout.changes`, and what is refused of it in one line."""

import pytest

from configs import base
from configs.errors import ConfigError
from settings import layouts, simulation
from settings.validation import check_keys, validate


def changing(changes: str, **keys):
    config = base.get_config()
    config.layout.changes = changes
    config.train.steps = 300
    for key, value in keys.items():
        section, name = key.split("__")
        config[section][name] = value
    return config


def test_each_step_is_on_the_mesh_of_the_last_change_before_it():
    config = changing(" 100: data=4, fsdp=2 ;200:context=8;")
    validate(config, 8)
    sizes = [layouts.mesh_after(config, step) for step in (0, 99, 100, 199, 200, 299)]
    assert sizes == [(1, 1, 8, 1, 1, 1)] * 2 + [(1, 4, 2, 1, 1, 1)] * 2 + [(1, 1, 1, 8, 1, 1)] * 2
    assert [layouts.stage_end(config, step) for step in (0, 99, 100, 200)] == [100, 100, 200, 300]
    assert [copy.mesh.context for copy in layouts.on_each_mesh(config).values()] == [1, 1, 8]
    config.train.steps = 150
    assert layouts.stage_end(config, 100) == 150


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("100 data=8", "'100 data=8' is not STEP: AXIS=DEVICES"),
        ("0: data=8", "'0: data=8' is not STEP"),
        ("100: data=-1", "'100: data=-1': '-1' is not a whole number greater than 0"),
        ("100:", "'100:' is not STEP"),
        ("100: dta=8", "'100: dta=8': 'dta' is not a mesh axis; did you mean data"),
        ("100: data=2,data=4", "data is named more than once"),
        ("200: data=8; 100: fsdp=8", "step 100 comes after step 200"),
    ],
)
def test_what_is_no_change_is_told_whatever_the_devices(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_keys(changing(changes))
    assert "\n" not in str(error.value) and str(error.value).startswith("layout.changes")


@pytest.mark.parametrize(
    ("changes", "keys", "message"),
    [
        ("100: data=4", {}, "after step 100: data=4 is 4 devices, there are 8; use a product of 8"),
        ("100: data=8", {"train__global_batch": 12, "mesh__fsdp": 1, "mesh__context": 8},
         "after step 100: train.global_batch=12 is not a multiple of its 8 shards"),
        ("9: data=8; 10: context=8", {"train__sequence_length": 100}, "step 10: train.sequence_length=100 is not"),
        ("9: data=4,context=2", {"train__sum_dtype": "float32"}, "step 9: train.sum_dtype=float32 needs"),
        ("9: data=8", {"batch__fit": "auto"}, "needs batch.fit=none, not auto"),
    ],
)  # fmt: skip
def test_a_mesh_that_cannot_be_is_told_with_its_step(changes, keys, message):
    with pytest.raises(ConfigError, match=message) as error:
        validate(changing(changes, **keys), 8)
    assert "\n" not in str(error.value)


def test_a_simulation_keeps_what_each_mesh_divides():
    config = changing("100: model=8; 200: fsdp=2,context=4", mesh__fsdp=8)
    simulation.scale_down(config, {})
    assert config.model.num_heads % 8 == config.train.sequence_length % 4 == config.model.embed_dim % 8 == 0
    validate(config, 8)
