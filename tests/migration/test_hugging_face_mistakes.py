# SPDX-License-Identifier: Apache-2.0
"""Mistakes in files of Hugging Face's format, and in what a user asks of them, are each reported in one line."""

import json
import pathlib
import shutil
import signal
import time
import types

import numpy as np
import pytest
import safetensors.numpy

from configs.errors import ConfigError
from migration import hugging_face, hugging_face_reader, logits, safetensors_files
from migration import hugging_face_families as families
from migration.safetensors_files import WeightsError
from settings import loading
from tests.migration import hugging_face_cases as cases
from tests.migration.record_hugging_face import FOLDER, SHARDED
from tests.test_train import command, finish


def test_a_model_of_no_family_is_told_with_what_keeps_it_from_the_nearest(tmp_path):
    config = loading.load("configs/moe_small.py", "", {}).config
    with pytest.raises(ConfigError, match=r"^none of the families .* is mixtral, which has model\.shared_experts=0$"):
        hugging_face.as_published(config, tmp_path, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type=gpt2 cannot be converted; supported: llama, "),
        ({"attention_bias": True}, "attention_bias=True is not supported for llama, only False"),
        ({"hidden_act": "relu"}, "hidden_act=relu is not supported, only silu, gelu_pytorch_tanh"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_parameters: rope_type=longrope"),
        ({"rope_parameters": None, "rope_scaling": {"type": "su"}}, "rope_scaling: rope_type=su is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 16}}, "beta_fast=16"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types: only every n-th"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, but num_hidden_layers=3"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "layer_types has linear_attention"),
        ({"num_key_value_heads": 3}, "model.num_heads=4 is not a multiple of model.num_kv_heads=3"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_type": "yarn"}}, "are both there"),
        ({"hidden_size": "wide"}, "config.json: hidden_size: should be a valid integer, but is 'wide'"),
        ({"hidden_size": True}, "hidden_size: should be a valid integer"),
        ({"num_attention_heads": 0}, "num_attention_heads: should be greater than or equal to 1, but is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: should be greater than or equal to 1"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers: should be less than or equal to 10000"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: should be greater than or equal to 1"),
        ({"vocab_size": 2**31 - 1}, "model.vocab_size=2147483647 must be at most 100,000,000"),
        ({"intermediate_size": 10**30}, "intermediate_size: should be less than or equal to"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: should be a finite number"),
        ({"rope_parameters": []}, "rope_parameters: should be an object, but is []"),
        ({"rope_parameters": {"full_attention": 3}}, "full_attention: should be an object, but is 3"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_theta is missing in rope_parameters"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear"}}, "rope_parameters: factor is missing for"),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 0.0, "rope_type": "yarn"}}, "factor: should"),
        ({"layer_types": [["full_attention"]]}, "layer_types.0: should be a valid string"),
        ({"model_type": ["llama"]}, "model_type: should be a valid string"),
        ({"model_type": "mistral", "sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "sliding_window"),
        (
            {"model_type": "mixtral", "num_hidden_layers": 10_000, "num_local_experts": 10_000},
            "model.num_layers=10000 with model.num_experts=10000 have more than 1,000,000 experts",
        ),
        ({"model_type": "mixtral", "num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported for mixtral"),
        ({"model_type": "mixtral", "num_local_experts": None}, "num_local_experts=None is not supported for mixtral"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "must be at most model.num_experts=8"),
    ],
)  # fmt: skip
def test_a_configuration_that_ours_have_not_is_named(tmp_path, changes, message):
    shutil.copytree(FOLDER / "llama2", tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        cases.import_run(tmp_path / "theirs", tmp_path / "run")
    assert message in str(caught.value) and "\n" not in str(caught.value) and str(file) in str(caught.value)
    assert time.monotonic() - began < 5
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize("config", [None, '{"eos_token": "x"}'], ids=["missing", "there"])
def test_a_tokenizer_that_cannot_be_used_is_refused_before_anything_is_written(tmp_path, config):
    """A run with it could neither be continued nor asked."""
    shutil.copytree(FOLDER / "llama2", tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text("{broken")
    if config:
        (tmp_path / "theirs" / "tokenizer_config.json").write_text(config)
    with pytest.raises(ConfigError, match=r"or remove .*/theirs/tokenizer\.json, to import without it"):
        cases.import_run(tmp_path / "theirs", tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_both_readers_know_what_a_config_json_may_lack():
    """transformers has these values; null is not one of them."""
    for kind, lacking in hugging_face_reader.LACKING.items():
        defaults = families.FAMILIES[kind].defaults
        assert {key: defaults.get(key) for key in lacking} == lacking
    given = json.loads((FOLDER / "gemma2" / "config.json").read_text())
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"):
        del given[key]
    model = families.model_section(given)
    assert (model["attention_soft_cap"], model["logit_soft_cap"], model["query_scalar"]) == (50, 30, 256)
    assert families.model_section(given | {"final_logit_softcapping": None})["logit_soft_cap"] == 0


def test_a_gemma_without_windows_names_none():
    """Null would be an error of its code in transformers."""
    model = families.model_section(json.loads((FOLDER / "gemma2" / "config.json").read_text()))
    tiny = dict(loading.load("configs/tiny.py", "", {}).config.model)
    values = families.config_json(tiny | model | {"sliding_window": 0, "global_every": 0})
    assert values["model_type"] == "gemma2" and "sliding_window" not in values
    assert families.model_section(values)["sliding_window"] == 0


def test_a_new_folder_may_be_a_link_to_an_empty_one(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with hugging_face.new_folder(tmp_path / "link", "hf") as part:
        (part / "file").touch()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["file"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]


def test_the_folder_of_the_shell_is_not_replaced(tmp_path, monkeypatch):
    """The shell would stay in the one that is no longer there."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is the folder you are in"), hugging_face.new_folder(pathlib.Path(), "hf"):
        pass


def test_a_folder_is_written_by_one_process_at_a_time(tmp_path):
    target = tmp_path / "export"
    with hugging_face.new_folder(target, "hf") as part:
        (part / "file").write_text("the first")
        with pytest.raises(ConfigError, match="another process writes it"), hugging_face.new_folder(target, "hf"):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert (target / "file").read_text() == "the first"


def test_what_an_interrupted_export_left_is_removed(tmp_path):
    part = tmp_path / ".export.unfinished"
    (part / "folder").mkdir(parents=True)
    (part / "old").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (part / "link").symlink_to(tmp_path / "mine")
    with hugging_face.new_folder(tmp_path / "export", "hf") as part:
        assert list(part.iterdir()) == []
    assert (tmp_path / "mine" / "file").exists()


def test_a_link_in_place_of_an_unfinished_export_is_not_followed(tmp_path):
    """In /tmp somebody else may have made it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (tmp_path / ".export.unfinished").symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError), hugging_face.new_folder(tmp_path / "export", "hf"):
        pass
    assert (tmp_path / "mine" / "file").exists()


def test_learned_step_sizes_are_no_part_of_an_exported_model():
    config = loading.load("configs/meta_text.py", "", {"meta.learn_rates": "true"}).config
    assert "inner_rates" not in logits.float32_run(config).abstract_state.params


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b"[]", b"3", b"", b"\xff\xfe{}"])
def test_a_config_json_that_is_none_is_told(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        hugging_face.read_config(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: ") and "\n" not in str(caught.value)


def spoiled(folder: pathlib.Path, how: str) -> None:
    """Change one thing in a file of weights."""
    file = folder / "model.safetensors"
    weights, name = safetensors.numpy.load_file(file), "model.layers.2.mlp.up_proj.weight"
    if how == "missing":
        del weights[name]
    elif how == "unknown":
        weights["model.layers.3.mlp.up_proj.weight"] = weights[name]
    elif how == "shape":
        weights[name] = np.ascontiguousarray(weights[name][:-1])
    elif how == "type":
        weights[name] = weights[name].astype(np.int32)
    elif how in ("cut", "text"):
        file.write_bytes(file.read_bytes()[:-1] if how == "cut" else b"version https://git-lfs.github.com/spec/v1")
        return
    safetensors.numpy.save_file(weights, file)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "lacks model.layers.2.mlp.up_proj.weight"),
        ("unknown", "has model.layers.3.mlp.up_proj.weight, for which the model has no place"),
        ("shape", "model.layers.2.mlp.up_proj.weight has shape [39, 24], but config.json means [40, 24]"),
        ("type", "model.layers.2.mlp.up_proj.weight has type I32; supported types: F32, F16, BF16"),
        ("cut", "truncated, or its header is wrong"),
        ("text", "not a safetensors file; in a git clone, run `git lfs pull`"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_and_nothing_is_written(tmp_path, how, message):
    shutil.copytree(FOLDER / "mistral", tmp_path / "theirs")
    spoiled(tmp_path / "theirs", how)
    with pytest.raises(WeightsError) as caught:
        cases.import_run(tmp_path / "theirs", tmp_path / "run")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], "model.safetensors.index.json has no weight_map from tensors to files of its folder"),
        (
            {"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}},
            "has no weight_map from tensors to files",
        ),
        ({"weight_map": {"lm_head.weight": "gone.safetensors"}}, "gone.safetensors: No such file or directory"),
        (
            {"weight_map": {"of.nobody": "model-00001-of-00002.safetensors"}},
            "lacks of.nobody, which model.safetensors.i",
        ),
        ({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}, "does not list for it"),
    ],
    ids=str,
)
def test_an_index_that_is_not_of_its_files_is_told(tmp_path, index, message):
    shutil.copytree(FOLDER / SHARDED, tmp_path / "theirs")
    (tmp_path / "theirs" / safetensors_files.INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightsError) as caught:
        cases.import_run(tmp_path / "theirs", tmp_path / "run")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_an_import_that_was_killed_leaves_no_run_and_is_begun_anew(tmp_path):
    program = (
        "import os, pathlib, signal, sys; from migration import safetensors_files; from tests.migration "
        "import hugging_face_cases as cases;"
        "safetensors_files.Stored.rows = lambda *_: os.kill(os.getpid(), signal.SIGKILL);"
        "cases.import_run(*map(pathlib.Path, sys.argv[1:]))"
    )
    folders = [str(FOLDER / "mistral"), str(tmp_path / "run")]
    status, _, _ = finish(command("-c", program, *folders, cache=tmp_path / "cache"))
    assert status == -signal.SIGKILL and (tmp_path / ".run.unfinished").exists() and not (tmp_path / "run").exists()
    cases.import_run(FOLDER / "mistral", tmp_path / "run")
    assert not (tmp_path / ".run.unfinished").exists() and (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.zeros((2, 3), np.int64), r"contains int64 \[2, 3\]; it must be int32 \[batch, length\]"),
        (np.zeros(3, np.int32), r"has int32 \[3\]"),
        (np.full((1, 2), 61, np.int32), "contains the id 61; ids must be from 0 to 60"),
        (np.full((1, 2), -1, np.int32), "contains the id -1; ids must be"),
        (np.zeros((1, 129), np.int32), "rows of 129 tokens are longer than model.max_length=128"),
        (None, "No such file"),
    ],
)
def test_tokens_that_are_none_are_named(tmp_path, tokens, message):
    if tokens is not None:
        np.save(tmp_path / "tokens.npy", tokens)
    with pytest.raises(ConfigError, match=message):
        logits.read_tokens(tmp_path / "tokens.npy", types.SimpleNamespace(vocab_size=61, max_length=128))
