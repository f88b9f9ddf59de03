# SPDX-License-Identifier: Apache-2.0
"""Recipe, then topology, then what was typed; and where each value came from."""

import contextlib
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from configs import base
from configs.errors import ConfigError
from settings import loading, stored_config, validation
from settings.keys import HIDDEN, flat, parse_value, refuse_passwords
from tests.support import RECIPES, ROOT


def test_the_recipes_that_others_use_are_there():
    promised = {"tiny", "small", "medium", "large", "llama2_7b", "llama2_13b", "llama3_8b", "llama_1b"}
    assert promised <= set(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_loads_and_is_consistent(recipe):
    config = loading.load(f"configs/{recipe}.py", "", {}).config
    validation.validate(config, 1)
    assert config.is_locked and config.mesh.fsdp == 1


@pytest.mark.parametrize(
    ("key", "text"),
    [("data.path", "{}a.txt"), ("data.mixture", "0.5 {}a.txt; 0.5 b.txt"), ("data.validation_path", "{}a.txt")],
)
def test_a_password_in_the_url_of_data_is_refused_and_not_shown(tmp_path, key, text):
    """Typed or in a recipe; a run that has one already stays readable."""
    text = text.format("https://user:s3:cr@t@host/")
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from configs import base\n\n\ndef get_config():\n    config = base.get_config()\n"
        f"    config.{key} = {text!r}\n    return config\n"
    )
    for path, typed in (("configs/tiny.py", {key: text}), (str(recipe), {})):
        with pytest.raises(ConfigError) as error:
            loading.load(path, "", typed)
        assert str(error.value).startswith(f"{key} has a URL with a password") and "cr@t" not in str(error.value)
    (tmp_path / stored_config.CONFIG).write_text(json.dumps(flat(base.get_config()) | {key: text}))
    assert flat(stored_config.load_to_read(tmp_path, {}).config)[key] == text


@pytest.mark.parametrize("place", ["sftp://user@host:22/", "abfs://box@host/a:b@c/", "https://host/a:b@c/"])
def test_other_uses_of_a_colon_in_a_url_are_no_passwords(place):
    refuse_passwords({"data.path": place})


def test_topology_stands_between_recipe_and_command_line(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from configs import base\n\n\ndef get_config():\n    config = base.get_config()\n"
        "    config.mesh.model = 2\n    config.mesh.data = 4\n    config.train.steps = 7\n    return config\n"
    )
    loaded = loading.load(str(recipe), "v4-32", {"mesh.fsdp": "4", "mesh.model": "4"})
    assert loaded.config.mesh.to_dict() == {"dcn_data": 1, "data": 1, "fsdp": 4, "context": 1, "expert": 1, "model": 4}
    assert loaded.recipe == "mine" and loaded.topology.name == "v4-32"
    assert loaded.typed == {"mesh.fsdp": 4, "mesh.model": 4}
    origins = {key: loaded.origins[key] for key in ("train.steps", "mesh.data", "mesh.model")}
    assert origins == {"train.steps": str(recipe), "mesh.data": "--topology=v4-32", "mesh.model": "command line"}
    assert "optimizer.name" not in loaded.origins


@pytest.mark.parametrize(
    ("typed", "lengths"),
    [
        ({"train.steps": "9"}, (9, 0, 0)),
        ({"train.tokens": "9000"}, (0, 9000, 0)),
        ({"train.epochs": "1.5"}, (0, 0, 1.5)),
    ],
)
def test_a_typed_length_of_the_run_replaces_the_recipes(typed, lengths):
    train = loading.load("configs/tiny.py", "", typed).config.train
    assert (train.steps, train.tokens, train.epochs) == lengths


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.steps", "12", 12),
        ("optimizer.learning_rate", "3e-4", 3e-4),
        ("train.epochs", "2", 2.0),
        ("data.path", "12", "12"),
        ("model.qk_norm", "TRUE", True),
        ("model.tie_embeddings", "0", False),
    ],
)
def test_text_becomes_the_type_of_the_default(key, text, value):
    parsed = parse_value(key, text, flat(base.get_config()))
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("key", "number", "value"),
    [
        ("train.steps", np.int64(12), 12),
        ("optimizer.learning_rate", np.float32(0.1), 0.1),
        ("model.qk_norm", np.bool_(True), True),
    ],
)
def test_a_number_of_numpy_is_one_of_python(key, number, value):
    parsed = parse_value(key, number, flat(base.get_config()))
    assert parsed == value and type(parsed) is type(value)
    for wrong in (np.array([3, 4]), np.float32(2.5), None):
        with pytest.raises(ConfigError, match="is not a whole number"):
            parse_value("train.steps", wrong, flat(base.get_config()))


def test_a_recipe_in_the_home_folder_is_named_by_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path, "from configs import tiny\n\nget_config = tiny.get_config\n")
    assert loading.load("~/mine.py", "", {}).origin["recipe"] == "~/mine.py"


def test_one_configuration_does_not_leak_into_the_next():
    first = base.get_config()
    first.train.steps = 1
    assert base.get_config().train.steps != 1


def test_reading_a_configuration_imports_neither_jax_nor_tensorflow():
    code = (
        "import sys; from settings import loading, simulation, validation\n"
        "loaded = loading.load('configs/llama3_8b.py', 'v4-64', {})\n"
        "simulation.scale_down(loaded.config, loaded.typed); validation.validate(loaded.config, 32)\n"
        "assert not {'jax', 'flax', 'tensorflow'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_value_is_from_the_recipe_that_set_it_though_another_is_built_on_it():
    origins = loading.load("configs/llama3_8b.py", "v4-64", {"train.steps": "7"}).origins
    assert origins["model.vocab_size"] == "configs/llama3_8b.py"
    assert origins["model.embed_dim"] == "configs/llama2_7b.py"
    assert origins["mesh.fsdp"] == "--topology=v4-64" and origins["train.steps"] == "command line"
    assert "model.norm_epsilon" not in origins
    assert loading.load("configs/trm/sudoku_mini.py", "", {}).origins["model.name"] == "configs/trm/sudoku.py"


def test_a_value_that_a_recipe_sets_back_to_the_default_is_its_own(tmp_path):
    recipe = tmp_path / "back.py"
    recipe.write_text(
        "from configs import base, tiny\ndef get_config():\n    config = tiny.get_config()\n"
        "    config.model.num_layers = base.get_config().model.num_layers\n    return config\n"
    )
    origins = loading.load(str(recipe), "", {}).origins
    assert origins["model.num_layers"] == str(recipe) and origins["model.embed_dim"] == "configs/tiny.py"


def written(folder, text: str, name: str = "mine") -> str:
    """Write a recipe of this workspace's kind; return its path."""
    file = folder / f"{name}.py"
    file.write_text(text)
    return str(file)


LINKED = """from configs import base

def get_config():
    config = base.get_config()
    config.model.max_length = config.train.get_ref("sequence_length")
    return config
"""


def test_keys_that_a_recipe_links_are_one_value_and_none_that_is_typed_is_lost(tmp_path):
    recipe = written(tmp_path, LINKED)
    loaded = loading.load(recipe, "", {"train.sequence_length": "64"})
    assert loaded.config.model.max_length == 64 and loaded.origins["model.max_length"] == "command line"
    for typed in ({"train.sequence_length": "64", "model.max_length": "1024"},
                  {"model.max_length": "1024", "train.sequence_length": "64"}):  # fmt: skip
        with pytest.raises(ConfigError, match=r"is lost, since .*mine.py links it by get_ref to another key"):
            loading.load(recipe, "", typed)


def test_a_secret_may_be_typed():
    url = "https://hooks/1"
    assert loading.load("configs/tiny.py", "", {"logging.alerts": url}).config.logging.alerts == url


def test_a_recipe_is_called_once_and_a_get_config_of_another_kind_is_not(tmp_path, monkeypatch):
    """It may keep its configuration, and import a module with a function of that name."""
    monkeypatch.syspath_prepend(tmp_path)
    written(tmp_path, "def get_config(name):\n    raise OSError\n", "of_another_kind")
    written(tmp_path, "def get_config():\n    return {'steps': 3}\n", "of_a_dictionary")
    parent = written(
        tmp_path,
        "from configs import tiny\n\nCONFIG = tiny.get_config()\n\n\n"
        "def get_config(more=5):\n    CONFIG.train.steps += more\n    return CONFIG\n",
        "parent",
    )
    recipe = written(
        tmp_path,
        "import of_a_dictionary\nimport of_another_kind\nimport parent\n\n\n"
        "def get_config():\n    config = parent.get_config()\n    config.model.num_layers = 3\n    return config\n",
    )
    before = loading.load("configs/tiny.py", "", {}).config.train.steps
    loaded = loading.load(recipe, "", {})
    assert loaded.config.train.steps == before + 5
    assert loaded.origins["model.vocab_size"] == "configs/tiny.py"
    assert loading.load(parent, "", {}).origins["train.steps"] == parent


def test_a_recipe_may_have_dataclasses_and_return_a_frozen_configuration(tmp_path):
    """A dataclass looks for the types of its fields in the module of its name."""
    recipe = written(
        tmp_path,
        "from __future__ import annotations\n\nimport dataclasses\n\nfrom ml_collections import FrozenConfigDict\n\n"
        "from configs import tiny\n\n\n@dataclasses.dataclass\nclass Sizes:\n    steps: int = 5\n\n\n"
        "def get_config():\n    config = tiny.get_config()\n    config.train.steps = Sizes().steps\n"
        "    return FrozenConfigDict(config)\n",
    )
    config = loading.load(recipe, "v4-8", {"model.num_layers": "3"}).config
    assert (config.train.steps, config.model.num_layers, config.mesh.fsdp) == (5, 3, 4) and config.is_locked
    assert "recipe_mine" not in sys.modules


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config.data.path = __import__('os').environ['NOT_SET']", "line 5: KeyError: 'NOT_SET'"),
        ("config.train.steps = {'small': 3}['large']", "line 5: KeyError: 'large'"),
        ("config.train.stepz = 3", "line 5: stepz is not a key; did you mean steps"),
        ("config.train['stepz']", "line 5: stepz is not a key; did you mean steps"),
        ("config.trian", "line 5: trian is not a key; did you mean train"),
        ("__import__('subprocess').run(['false'], check=True)", "line 5: Command '\\['false'\\]' returned non-zero"),
        ("config.model.vocab_size = base.KEYS['model.vocab_sizes']", "line 5: KeyError: 'model.vocab_sizes'"),
    ],
)
def test_a_mistake_in_a_recipe_is_told_with_its_line(tmp_path, line, message):
    begin = "from configs import base\n\ndef get_config():\n    config = base.get_config()\n"
    text = f"{begin}    {line}\n    return config\n"
    with pytest.raises(ConfigError, match=f"mine.py, {message}"):
        loading.load(written(tmp_path, text), "", {})


def test_a_recipe_that_was_written_again_at_once_is_read_again(tmp_path, monkeypatch):
    """As by a script, with the same size and within a second: Python would take its bytecode for that of both."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    recipe = tmp_path / "written.py"
    for number in (2, 3):
        recipe.write_text(
            f"from configs import small\ndef get_config():\n    config = small.get_config()\n"
            f"    config.model.num_layers = {number}\n    return config\n"
        )
        os.utime(recipe, (10**9, 10**9))
        assert loading.load(str(recipe), "", {}).config.model.num_layers == number
    assert not (tmp_path / "__pycache__").exists()


def test_a_stored_configuration_says_so_and_other_data_takes_the_place_of_its_own(tmp_path):
    stored = flat(base.get_config()) | {"data.path": "a", "data.validation_path": "b", "model.num_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    loaded = stored_config.load_to_read(tmp_path, {"data.path": "c"})
    assert (loaded.config.data.path, loaded.config.data.validation_path) == ("c", "")
    assert loaded.config.data.tokenizer == str(tmp_path / "tokenizer.model")
    assert loaded.origins["model.num_layers"] == str(tmp_path / "config.json")
    (tmp_path / "tokenizer.json").touch()  # of an earlier attempt
    assert stored_config.load_to_read(tmp_path, {}).config.data.tokenizer == str(tmp_path / "tokenizer.model")
    (tmp_path / "config.json").write_text(json.dumps(stored | {"data.tokenizer": "/elsewhere/mine.json"}))
    assert stored_config.load_to_read(tmp_path, {}).config.data.tokenizer == str(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match="tokenizer is fixed by the run"):
        stored_config.load_to_read(tmp_path, {"data.tokenizer": "byte"})


def test_an_older_run_with_the_spike_guard_and_a_stream_can_be_read_and_goes_on_without_the_guard(tmp_path):
    """The pair is refused since then."""
    stored = flat(base.get_config()) | {"data.stream": "a:10,b:10", "train.spike_deviations": 3.0}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert stored_config.load_to_read(tmp_path, {}).config.train.spike_deviations == 0
    typed = {"train.spike_deviations": "0"}
    assert stored_config.load_to_continue(tmp_path, 5, None, "", typed, {}).config.data.stream == "a:10,b:10"
    loaded = stored_config.load_to_continue(tmp_path, 5, None, "", {}, {})
    with pytest.raises(ConfigError, match=r"each new task; --config\.train\.spike_deviations=0 also continues"):
        validation.check_keys(loaded.config)


def test_an_older_run_with_a_value_that_its_model_never_read_is_used_without_it(tmp_path):
    """Earlier versions took it, and it can neither be left out nor typed otherwise."""
    config = loading.load("configs/trm/sudoku.py", "", {}).config
    unread = {"model.dropout": 0.1, "model.tie_embeddings": True, "model.sliding_window": 128, "model.global_every": 4}
    stored = flat(config) | unread
    (tmp_path / "config.json").write_text(json.dumps(stored))
    for loaded in (
        stored_config.load_to_read(tmp_path, {}),
        stored_config.load_to_continue(tmp_path, 3, None, "", {"model.dropout": "0"}, {}),
    ):
        validation.validate(loaded.config, 1, loaded)
        assert (loaded.config.model.dropout, loaded.config.model.tie_embeddings) == (0.0, False)
    again = stored_config.load_to_continue(tmp_path, 3, None, "", {"model.dropout": "0.1"}, {})
    with pytest.raises(ConfigError, match=r"model.dropout=0.0, not 0.1 \(this model does not read it\)"):
        validation.validate(again.config, 1, again)


def test_a_run_is_read_with_the_machine_keys_of_here(tmp_path):
    """Only where its checkpoints lie belongs to the run; what is typed counts, even if no command reads it."""
    elsewhere = {"data.cache_dir": "/nowhere", "data.readers": 3, "logging.report": False, "checkpoint.per_host": True}
    (tmp_path / "config.json").write_text(json.dumps(flat(base.get_config()) | elsewhere))
    config = stored_config.load_to_read(tmp_path, {"logging.tensorboard": "false", "data.prefetch": "2"}).config
    assert (config.data.cache_dir, config.data.readers, config.data.prefetch) == ("", 0, 2)
    assert config.logging.report and not config.logging.tensorboard and config.checkpoint.per_host


def test_the_base_of_a_run_may_have_moved(tmp_path):
    """Its digest in the checkpoint says whether it is the same."""
    for key in ("train.init_from", "distillation.teacher"):
        for folder, refused in (("old/run", False), ("", True)):
            (tmp_path / "config.json").write_text(json.dumps(flat(base.get_config()) | {key: folder}))
            with pytest.raises(ConfigError, match=re.escape(key)) if refused else contextlib.nullcontext():
                loaded = stored_config.load_to_continue(tmp_path, 4, None, "", {key: "new/run"}, {})
                assert flat(loaded.config)[key] == "new/run"


def test_a_run_continues_with_the_machine_keys_of_its_recipe_whether_it_is_named_or_not(tmp_path):
    """They are not those that were typed when it began."""
    recipe = flat(loading.load("configs/trm/sudoku.py", "", {}).config)
    assert (recipe["mesh.data"], recipe["mesh.fsdp"]) == (-1, 1)
    (tmp_path / "config.json").write_text(json.dumps(recipe | {"mesh.data": 4, "data.readers": 7}))
    secret = {"logging.alerts": HIDDEN}  # as it is stored
    (tmp_path / "run.json").write_text(json.dumps({"recipe": "sudoku", "recipe_config": recipe | secret}))
    named = ("configs/trm/sudoku.py", loading.load("configs/trm/sudoku.py", "", {}).config)
    for given in (None, named):
        config = stored_config.load_to_continue(tmp_path, 4, given, "", {}, {}).config
        assert (config.mesh.data, config.mesh.fsdp, config.data.readers) == (-1, 1, 0)
        assert config.logging.alerts == ""


def test_the_folder_of_a_run_does_not_choose_where_compiled_programs_are_read_from(tmp_path):
    """It may be a stranger's, and the programs in a cache are run."""
    stored = flat(base.get_config())
    (tmp_path / "config.json").write_text(json.dumps(stored))
    places = {"data.cache_dir": "/theirs", "checkpoint.staging": "/staging"}
    (tmp_path / "run.json").write_text(json.dumps({"recipe": "tiny", "recipe_config": stored | places}))
    loaded = stored_config.load_to_continue(tmp_path, 4, None, "", {"checkpoint.staging": "mine"}, {})
    assert (loaded.config.data.cache_dir, loaded.config.checkpoint.staging) == ("", "mine")
    assert loaded.notes == [
        "data.cache_dir=/theirs of the recipe is not used, because a run's folder may not choose other folders; "
        "name the recipe again, or type --config.data.cache_dir"
    ]


def test_only_values_that_a_run_gives_a_reader_are_named_as_its_own(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(flat(base.get_config()) | {"mesh.fsdp": 1, "train.steps": 7}))
    loaded = stored_config.load_to_read(tmp_path, {})
    assert loaded.origins["train.steps"] == str(tmp_path / "config.json")
    assert loaded.config.mesh.fsdp == -1 and "mesh.fsdp" not in loaded.origins
    assert stored_config.load_to_read(tmp_path, {"train.gradient_accumulation": "2"}).config.train.steps == 7


def test_a_stored_language_model_takes_any_length_and_puzzles_keep_theirs(tmp_path):
    stored = flat(base.get_config())
    (tmp_path / "config.json").write_text(json.dumps(stored))
    for length, longest in ((4096, 4096), (128, 1024)):
        config = stored_config.load_to_read(tmp_path, {"train.sequence_length": str(length)}).config
        assert (config.train.sequence_length, config.model.max_length) == (length, longest)
    (tmp_path / "config.json").write_text(json.dumps(stored | {"model.name": "trm"}))
    with pytest.raises(ConfigError, match=r"train\.sequence_length is fixed by the run"):
        stored_config.load_to_read(tmp_path, {"train.sequence_length": "128"})


def test_a_typed_alternative_puts_the_recipes_out_of_force(tmp_path):
    recipe = tmp_path / "mixed.py"
    recipe.write_text(
        "from configs import base\ndef get_config():\n    config = base.get_config()\n"
        "    config.data.mixture = '1 a.txt'\n    config.train.update(steps=0, epochs=2.0)\n    return config\n"
    )
    assert loading.load(str(recipe), "", {}).config.data.mixture == "1 a.txt"
    config = loading.load(str(recipe), "", {"data.path": "b.txt", "train.tokens": "900"}).config
    assert (config.data.path, config.data.mixture) == ("b.txt", "")
    assert (config.train.steps, config.train.tokens, config.train.epochs) == (0, 900, 0.0)


@pytest.mark.parametrize(
    ("recipe", "topology", "typed", "mesh"),
    [
        ("mixtral_8x7b", "v5p-128", {}, (64, 1)),
        ("mixtral_8x7b", "v5p-128", {"train.global_batch": "64"}, (8, 8)),  # too few tokens hide no all-gather
        ("mixtral_8x7b", "v4-64", {"train.global_batch": "32"}, (4, 8)),
        ("mixtral_8x7b", "v4-64", {"train.global_batch": "32", "model.num_experts": "6"}, (16, 2)),
        ("mixtral_8x7b", "cpu", {}, (1, 1)),
        ("mixtral_8x7b", "v4-64", {"train.global_batch": "32", "model.mlp_dim": "1024"}, (32, 1)),
        ("small_moe", "v4-8", {}, (4, 1)),
        ("small_moe", "v4-8", {"model.num_experts": "128"}, (1, 4)),
    ],
)
def test_a_presets_mesh_splits_experts_that_are_too_large_to_be_brought_whole(recipe, topology, typed, mesh):
    found = loading.load(f"configs/{recipe}.py", topology, typed).config.mesh
    assert (found.fsdp, found.expert) == mesh


def test_the_folder_of_a_recursive_model_is_a_recipe_of_its_objective(tmp_path):
    """Its model goes with no other objective, so that the folder alone would be refused."""
    config = loading.load("configs/trm/sudoku_mini.py", "", {}).config
    (tmp_path / "config.json").write_text(json.dumps(flat(config)))
    found = loading.load(str(tmp_path), "", {}).config
    assert (found.model.name, found.train.objective) == ("trm", "recursive")
