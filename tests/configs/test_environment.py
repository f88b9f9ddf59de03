# SPDX-License-Identifier: Apache-2.0
"""The mesh of TPU_MESH_CONFIG and TPU_AXIS_NAMES: where it stands, its order, its errors."""

import json
import math

import pytest

from configs import base
from configs.base import MESH_AXES
from configs.errors import ConfigError
from settings import loading, stored_config, validation
from settings.keys import flat
from settings.resolving import Loaded

EARLIER = {"TPU_MESH_CONFIG": "4,4,2", "TPU_AXIS_NAMES": "data,model,fsdp"}


def load(topology: str = "", typed: dict | None = None, **environment: str) -> Loaded:
    return loading.load("configs/large.py", topology, typed or {}, environment)


def sizes(loaded: Loaded) -> dict[str, int]:
    return {axis: size for axis, size in loaded.config.mesh.items() if size != 1}


def test_the_environment_sets_the_mesh_and_its_order_and_is_named_as_their_origin():
    loaded = load(**EARLIER)
    assert sizes(loaded) == {"data": 4, "model": 4, "fsdp": 2} == loaded.environment_mesh
    assert list(loaded.environment_mesh) == ["data", "model", "fsdp"]
    assert loaded.config.layout.axis_order == "dcn_data,data,model,fsdp,context,expert"
    set_by = {f"mesh.{axis}" for axis in MESH_AXES} | {"layout.axis_order"}
    assert {key for key, origin in loaded.origins.items() if origin == "TPU_MESH_CONFIG"} == set_by
    validation.validate(loaded.config, 32, loaded)


def test_three_numbers_without_names_have_those_of_the_earlier_system():
    assert load(TPU_MESH_CONFIG="4,4,2").environment_mesh == load(**EARLIER).environment_mesh


@pytest.mark.parametrize("environment", [{}, {"TPU_MESH_CONFIG": ""}, {"TPU_MESH_CONFIG": "", "TPU_AXIS_NAMES": " "}])
def test_an_environment_that_says_nothing_changes_nothing(environment):
    loaded, without = load(**environment), loading.load("configs/large.py", "", {})
    assert loaded.config == without.config and loaded.origins == without.origins and not loaded.environment_mesh


def test_typed_before_environment_before_topology_before_recipe(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from configs import base\n\n\ndef get_config():\n    config = base.get_config()\n"
        "    config.mesh.context = 2\n    config.layout.axis_order = 'dcn_data,model,expert,context,fsdp,data'\n"
        "    return config\n"
    )
    on_slice = loading.load(str(recipe), "v4-32", {})
    assert sizes(on_slice) == {"fsdp": 16} and on_slice.origins["layout.axis_order"] == str(recipe)
    typed = {"mesh.fsdp": "4", "layout.axis_order": ",".join(MESH_AXES)}
    loaded = loading.load(str(recipe), "v4-32", typed, {"TPU_MESH_CONFIG": "2,8", "TPU_AXIS_NAMES": "model,fsdp"})
    assert sizes(loaded) == {"model": 2, "fsdp": 4} and loaded.config.layout.axis_order == ",".join(MESH_AXES)
    origins = [loaded.origins[key] for key in ("mesh.model", "mesh.fsdp", "mesh.context", "layout.axis_order")]
    assert origins == ["TPU_MESH_CONFIG", "command line", "TPU_MESH_CONFIG", "command line"]


def test_an_axis_that_is_not_named_can_be_typed_and_take_what_is_left():
    loaded = load(typed={"mesh.context": "-1"}, TPU_MESH_CONFIG="2,4", TPU_AXIS_NAMES="fsdp,model")
    validation.resolve_mesh(loaded.config, 16, loaded)
    assert sizes(loaded) == {"fsdp": 2, "model": 4, "context": 2}


def test_slices_can_be_named_first():
    loaded = load(TPU_MESH_CONFIG=" 2, 4 ", TPU_AXIS_NAMES="dcn_data, fsdp")
    assert loaded.config.layout.axis_order == "dcn_data,fsdp,data,context,expert,model"
    validation.validate(loaded.config, 8, loaded)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"TPU_MESH_CONFIG": "4,x,2"}, "TPU_MESH_CONFIG=4,x,2: 'x' is not a whole number greater than 0"),
        ({"TPU_MESH_CONFIG": "4,0,2"}, "'0' is not a whole number"),
        ({"TPU_MESH_CONFIG": "4,-1,2"}, "'-1' is not a whole number"),
        ({"TPU_MESH_CONFIG": "4,4,2.0"}, "'2.0' is not a whole number"),
        ({"TPU_MESH_CONFIG": "4,4,"}, "'' is not a whole number"),
        ({"TPU_MESH_CONFIG": "4,4"}, "TPU_MESH_CONFIG=4,4 needs TPU_AXIS_NAMES, a name for each number"),
        ({"TPU_MESH_CONFIG": "4,4", "TPU_AXIS_NAMES": "data"}, "2 numbers, but 1 names"),
        ({"TPU_AXIS_NAMES": "data,model"}, "TPU_AXIS_NAMES=data,model without TPU_MESH_CONFIG"),
        ({"TPU_MESH_CONFIG": "4,4", "TPU_AXIS_NAMES": "data,modl"}, "'modl' is not a mesh axis; did you mean model"),
        ({"TPU_MESH_CONFIG": "4,4", "TPU_AXIS_NAMES": "data,tensor"}, "'tensor' is not a mesh axis (all: dcn_data, "),
        ({"TPU_MESH_CONFIG": "4,4", "TPU_AXIS_NAMES": "data,"}, "'' is not a mesh axis"),
        ({"TPU_MESH_CONFIG": "4,4", "TPU_AXIS_NAMES": "fsdp,fsdp"}, "fsdp is named more than once"),
        ({"TPU_MESH_CONFIG": "4,2", "TPU_AXIS_NAMES": "fsdp,dcn_data"}, "dcn_data, the network between slices,"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_line(environment, words):
    with pytest.raises(ConfigError) as caught:
        load(**environment)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def misfit(topology: str, num_devices: int, **environment: str) -> str:
    loaded = load(topology, **environment)
    with pytest.raises(ConfigError) as caught:
        validation.validate(loaded.config, num_devices, loaded)
    return str(caught.value)


def test_a_mesh_of_tensorcores_is_told_which_slice_it_is_for_and_what_fits():
    assert misfit("v4-32", 16, **EARLIER) == (
        "TPU_MESH_CONFIG=4,4,2 needs 32 devices, v4-32 has 16 chips; 4,4,2 is for a v4-64 (32 chips); "
        "a v4-32 has 32 TensorCores, but JAX shows a chip as one device; on v4-32 use 4,2,2"
    )


@pytest.mark.parametrize(
    ("topology", "num_devices", "said"),
    [
        ("v4-128", 64, "needs 128 devices, v4-128 has 64 chips; a v4-128 has 128 TensorCores, but"),
        ("v5p-32", 16, "needs 128 devices, v5p-32 has 16 chips; on v5p-32 use 4,2,2"),
        ("v5e-16", 16, "needs 128 devices, v5e-16 has 16 chips; on v5e-16 use 4,2,2"),
        ("", 64, "there are 64; a chip of v4 or v5p has 2 TensorCores, but JAX shows it as one device; on 64 devices"),
        ("", 256, "needs 128 devices, there are 256; on 256 devices use 8,4,8"),
    ],
)
def test_what_is_said_of_a_mesh_that_does_not_fit_is_true_of_the_devices(topology, num_devices, said):
    assert said in misfit(topology, num_devices, TPU_MESH_CONFIG="8,4,4")


def test_a_mesh_that_is_too_small_is_an_error_too():
    assert "2,2,2 is for a v4-16 (8 chips); on v4-32 use 2,2,4" in misfit("v4-32", 16, TPU_MESH_CONFIG="2,2,2")


def test_where_an_axis_was_typed_the_whole_mesh_is_told():
    loaded = load("v4-32", {"mesh.fsdp": "4"}, **EARLIER)
    with pytest.raises(ConfigError, match=r"mesh data=4 .*needs 64 devices, but there are 16"):
        validation.resolve_mesh(loaded.config, 16, loaded)


@pytest.mark.parametrize(
    ("wanted", "num_devices", "shape"),
    [
        ((4, 4, 2), 16, (4, 2, 2)), ((4, 4, 2), 64, (4, 4, 4)), ((4, 4, 2), 8, (2, 2, 2)), ((4, 4, 2), 4, (2, 2, 1)),
        ((4, 4, 2), 32, (4, 4, 2)), ((8, 1), 4, (4, 1)), ((2, 1, 2), 1, (1, 1, 1)), ((4, 4), 7, (7, 1)),
        ((5,), 12, (12,)), ((3, 4), 8, (2, 4)), ((16, 1, 16), 4096, (64, 1, 64)),
    ],
)  # fmt: skip
def test_the_nearest_shape_has_the_product_and_the_kinds_of_axes(wanted, num_devices, shape):
    assert math.prod(shape) == num_devices
    assert validation.nearest_shape(wanted, num_devices) == shape


@pytest.mark.parametrize(
    "order",
    ["", "data,fsdp", "data,dcn_data,fsdp,context,expert,model", "dcn_data,data,data,context,expert,model",
     "dcn_data,data,fsdp,context,expert,tensor", "dcn_data, data, fsdp, context, expert, model"],
)  # fmt: skip
def test_an_order_that_is_no_permutation_of_the_axes_is_told_in_one_line(order):
    config = base.get_config()
    config.layout.axis_order = order
    with pytest.raises(ConfigError, match=r"must be dcn_data and then .* in any order") as caught:
        validation.check_keys(config)
    assert str(caught.value).startswith(f"layout.axis_order={order} ") and "\n" not in str(caught.value)


def test_any_permutation_behind_the_slices_is_taken():
    config = base.get_config()
    config.layout.axis_order = "dcn_data,model,expert,context,fsdp,data"
    validation.check_keys(config)


def test_a_stored_run_is_read_on_the_devices_that_there_are_in_the_default_order(tmp_path):
    stored = flat(load(**EARLIER).config)
    assert stored["layout.axis_order"].startswith("dcn_data,data,model")
    (tmp_path / "config.json").write_text(json.dumps(stored))
    loaded = stored_config.load_to_read(tmp_path, {})
    assert sizes(loaded) == {"fsdp": -1} and loaded.config.layout.axis_order == ",".join(MESH_AXES)
    assert not loaded.environment_mesh


def test_a_run_stored_before_there_were_slices_is_read(tmp_path):
    stored = flat(base.get_config())
    del stored["mesh.dcn_data"], stored["layout.axis_order"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    loaded = stored_config.load_to_read(tmp_path, {"mesh.dcn_data": "2"})
    validation.validate(loaded.config, 8)
    assert sizes(loaded) == {"dcn_data": 2, "fsdp": 4}


def test_the_batch_is_split_over_slices_too():
    loaded = load("cpu-8", {"mesh.dcn_data": "2", "mesh.fsdp": "-1", "train.global_batch": "20"})
    with pytest.raises(ConfigError, match=r"8 shards \(mesh dcn_data \* data \* fsdp \* expert\); use 16 or 24"):
        validation.validate(loaded.config, 8)
    assert loaded.config.mesh.fsdp == 4
