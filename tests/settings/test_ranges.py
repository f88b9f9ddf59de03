# SPDX-License-Identifier: Apache-2.0
"""A number beyond what its key may have is refused in one short line, before anything is built from it."""

import functools
import json
import time

import pytest

from configs import base
from configs.base import KEYS
from configs.errors import ConfigError
from input_pipeline import ledger
from settings import loading, ranges, stored_config, validation
from settings.keys import flat

DEFAULTS = flat(base.get_config())
NUMBERS = sorted(key for key, value in DEFAULTS.items() if isinstance(value, int | float) and type(value) is not bool)
WHOLE = [key for key in NUMBERS if isinstance(DEFAULTS[key], int)]
STORED = {"model.name": "decoder_lm", "model.max_length": 8, "train.objective": "language_modeling"}
STORED |= {"data.tokenizer": "byte"}


def refused(recipe: str = "configs/tiny.py", **typed) -> str:
    """Return the line with which a command line with these keys is refused."""
    began = time.monotonic()
    with pytest.raises(ConfigError) as error:
        loaded = loading.load(recipe, "", {key: str(value) for key, value in typed.items()})
        validation.validate(loaded.config, 8, loaded)
    assert time.monotonic() - began < 2
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    return str(error.value)


@pytest.mark.parametrize("key", WHOLE)
def test_a_whole_number_that_no_machine_could_have_is_refused_by_its_key(key):
    for value in (KEYS[key].largest + 1, 10**30, "9" * 4000):
        assert refused(**{key: value}).startswith(f"{key}={str(value)[:50]}"), value
    assert len(str(refused(**{key: "9" * 5000}))) < 200  # more digits than Python reads


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", ["nan", "inf", "-1e300"])
def test_what_is_no_size_is_refused_by_its_key(key, value):
    value = "-" + "9" * 30 if key in WHOLE else value
    assert key in refused(**{key: value})


@pytest.mark.parametrize("key", ["model.num_layers", "model.vocab_size", "train.global_batch", "model.head_dim"])
def test_the_largest_of_a_size_is_checked_and_not_built(key):
    """What is allowed may still not fit a machine; validation itself has to answer quickly."""
    began = time.monotonic()
    config = loading.load("configs/tiny.py", "", {key: str(KEYS[key].largest)}).config
    config.train.update(steps=1, eval_every=0)
    validation.validate(config, 1)
    assert time.monotonic() - began < 2


def test_a_prompt_that_is_not_utf8_is_refused_by_its_key():
    line = refused(**{"causality.prompt": "a\udcff", "causality.corrupt": "b"})  # as Python reads the byte FF
    assert line == r"causality.prompt='a\udcff' is not UTF-8"


def test_the_ledger_takes_every_batch_that_a_run_may_have():
    assert KEYS["train.global_batch"].largest == KEYS["train.sequence_length"].largest == ledger.MOST


def test_products_of_the_largest_sizes_fit_64_bits():
    size = {name: key.largest for name, key in KEYS.items()}
    assert size["train.global_batch"] * size["train.sequence_length"] < 2**63
    assert size["model.embed_dim"] * size["model.mlp_dim"] * 4 < 2**63
    assert size["model.vocab_size"] * size["model.embed_dim"] * 4 < 2**63


def test_what_would_fit_is_found_at_once_for_large_numbers_too():
    """Numbers with few divisors, or many: the message names one that would do."""
    typed = {"train.sequence_length": 999_999_937, "model.max_length": 10**9, "evaluation.chunk_tokens": 2}
    assert refused(**typed).endswith("does not divide train.sequence_length=999999937; use 1")
    assert refused(**{"model.num_heads": 99_991, "model.num_kv_heads": 2}).endswith("num_kv_heads could be 1 or 99991")
    assert validation.nearest_shape((2,) * 6, 15_984) == (2, 2, 2, 2, 3, 333)


def test_a_recursive_model_has_few_layers():
    line = refused("configs/trm/sudoku_mini.py", **{"model.num_layers": 65})
    assert line.startswith("model.num_layers=65 must be at most 64 with model.name=trm")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "model.name is missing"),
        (b"[]", "should be an object, but is []"),
        (b"[" * 100_000, "is not valid JSON (recursion limit exceeded"),
        (json.dumps(STORED | {"model.num_layers": "6"}).encode(), "model.num_layers should be of type int"),
        (json.dumps(STORED | {"model.num_layers": True}).encode(), "model.num_layers should be of type int"),
        (json.dumps(STORED | {"train.epochs": []}).encode(), "train.epochs"),
        (json.dumps(STORED | {"model.heads": 3}).encode(), "has model.heads, which this version does not know"),
    ],
)
def test_a_stored_configuration_that_is_none_is_named_by_file_and_key(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        stored_config.load_to_read(tmp_path, {})
    assert f"{tmp_path}/config.json" in str(error.value) and message in str(error.value)


def test_a_published_model_is_no_damaged_run(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    with pytest.raises(ConfigError, match=f"a published model and no run; import it by .* --hf={tmp_path} "):
        stored_config.load_to_read(tmp_path, {})


def test_a_module_that_was_added_in_this_session_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "ROOT", tmp_path)
    monkeypatch.setattr(ranges, "_names", functools.cache(ranges._names.__wrapped__))  # of this test alone
    (tmp_path / "models").mkdir()
    values = {"model.name": "mine", "model.dtype": "float32", "train.steps": 1, "train.global_batch": 1}
    with pytest.raises(ConfigError, match="name=mine is unknown"):
        ranges.check(values)
    (tmp_path / "models" / "mine.py").write_text("def make(config):\n    pass\n")
    ranges.check(values)


def test_a_key_that_an_older_version_did_not_store_has_its_default(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(STORED))
    config = stored_config.load_to_read(tmp_path, {"data.path": "x"}).config
    assert (config.model.num_layers, config.model.max_length, config.data.path) == (6, 8, "x")


def test_the_interface_of_objectives_is_no_objective():
    line = refused(**{"train.objective": "objective"})
    assert line.startswith("train.objective=objective is unknown") and "objective," not in line.partition("all:")[2]


@pytest.mark.parametrize(("key", "value"), [("clip_norm", None), ("warmup_steps", False), ("name", None)])
def test_a_value_of_another_type_is_refused_since_the_run_could_not_be_read(key, value):
    """ml_collections lets Python code set these."""
    config = loading.load("configs/tiny.py", "", {}).config
    config.optimizer[key] = value
    with pytest.raises(ConfigError, match=f"^the configuration: optimizer.{key} should be of type .*, but is {value}"):
        validation.validate(config, 1)
