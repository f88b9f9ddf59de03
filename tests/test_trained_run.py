# SPDX-License-Identifier: Apache-2.0
"""A run used from Python, as docs/python.md shows it: its blocks run as they stand there."""

import json
import os
import re

import numpy as np
import pytest

import trained_run
from configs.errors import ConfigError
from core.evaluation import opening
from input_pipeline import corpus as corpora
from settings import loading
from tests import warm
from tests.support import ROOT
from tests.test_train import arguments, command, finish, lines_of, place  # noqa: F401

BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def whole(place) -> str:  # noqa: F811
    """The output of the run of test_train.py, started from the template."""
    status, out, err = finish(command("train.py", *arguments(place, "whole"), cache=place))
    assert status == 0, err
    return out


@pytest.fixture(scope="module")
def folder(place, whole):  # noqa: F811
    """A folder in which runs/tiny is a run, and from which the clone's recipes are found."""
    (place / "runs").mkdir()
    (place / "runs" / "tiny").symlink_to(place / "whole")
    (place / "small.py").write_text(
        "from configs import char\ndef get_config():\n    config = char.get_config()\n    config.model.update("
        "num_layers=1, embed_dim=16, num_heads=1, num_kv_heads=1, mlp_dim=16)\n    config.train.update("
        "sequence_length=32)\n    config.data.path = 'texts/*.txt'\n    config.evaluation.sample_tokens = 4\n"
        "    return config\n"
    )
    return place


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=["generate", "logits", "metrics", "train", "step"])
def test_a_block_of_the_page_runs_as_it_stands(folder, block):
    code = block.replace("configs/tiny.py", "small.py")
    program = f"import os, sys; os.chdir({str(folder)!r}); sys.path.insert(0, {str(ROOT)!r})\n{code}"
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder), "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    status, out, err = finish(warm.start(["-c", program], environment))
    assert status == 0 and out.strip(), err


@pytest.mark.slow
def test_logits_are_those_that_generate_draws_from(folder):
    run = trained_run.open_run(folder / "runs" / "tiny")
    assert run.describe() == f"{folder}/runs/tiny at step 12"
    [text] = run.generate(["1 is"], max_tokens=1, temperature=0.0)
    tokens = [run.tokenizer.end_of_document, *b"1 is"]  # a byte is a token, so no token is drawn again
    assert run.generate(iter(["1 is"]), max_tokens=1, temperature=0.0) == [text]
    assert run.tokenizer.decode([int(run.logits(np.array([tokens]))[0, -1].argmax())]) == text[len("1 is") :]
    assert [line["step"] for line in run.metrics()] == sorted(lines_of(folder / "whole", "train"))


@pytest.mark.slow
def test_what_has_no_meaning_is_refused(folder):
    run = trained_run.open_run(folder / "runs" / "tiny")
    for wrong, message in (
        (lambda: run.generate("def "), "'def ' is one text; give a list of texts"),
        (lambda: run.generate(None), "'None' is one text; give a list of texts"),
        (lambda: run.generate(["def "], max_tokens=0), "max_tokens=0 must be a whole number from 1 to "),
        (lambda: run.generate(["def "], max_tokens="3"), "max_tokens='3' must be a whole number from 1 to "),
        (lambda: run.generate(["def "], max_tokens=2.5), "max_tokens=2.5 must be a whole number from 1 to "),
        (lambda: run.generate(["def "], top_k=2.5), "top_k=2.5 must be a whole number from 0 to "),
        (lambda: run.generate(["def "], seed=2**70), "seed=1180591620717411303424 must be a whole number from -"),
        (lambda: run.generate(["def "], top_p=None), "top_p=None must be a number from 0 to 1"),
        (lambda: run.generate(["def "], max_token=2), "max_token is not one of the arguments, which are max_tokens, "),
        (lambda: run.generate(["def "], temperature=-1.0), r"temperature=-1.0 must be a number from 0 to 1e\+30"),
        (lambda: run.generate(["def "], temperature=float("nan")), "temperature=nan must be a number from 0 to 1e"),
        (lambda: next(run.stream("def ", max_tokens=-5)), "max_tokens=-5 must be a whole number from 1 to "),
        (lambda: run.logits(np.zeros((1, 1 + run.config.model.max_length), int)), "longer than model.max_length="),
        (lambda: run.logits([[1, run.config.model.vocab_size]]), "the vocabulary has 0 to "),
        (lambda: run.logits([[1, -1]]), "tokens are -1 to 1; the vocabulary has 0 to "),
        (lambda: run.logits([[1.5, 2]]), r"tokens are float64 \[1, 2\]; give whole numbers \[rows, length\]"),
        (lambda: run.logits([[1, 2, 3], [1]]), "tokens have rows of different lengths; give whole numbers"),
        (lambda: run.logits([1, 2]), r"tokens are int64 \[2\]; give whole numbers"),
        (lambda: run.generate(["\ud800"]), r"'\\ud800' has an unpaired surrogate"),
        (lambda: run.solve("3 4=7:"), "'3 4=7:' is one text; give a list of texts"),
        (lambda: run.metrics("trian"), "has no lines of the kind 'trian'; it has .*eval, event, .*train"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_no_tokens_have_no_logits(folder):
    run = trained_run.open_run(folder / "runs" / "tiny")
    assert run.logits(np.array([[]])).shape == (1, 0, run.config.model.vocab_size)


def test_a_run_stays_open_when_the_current_folder_changes(folder, tmp_path, monkeypatch):
    """The run of this module has no file of a tokenizer, so its path is seen in another one."""
    monkeypatch.chdir(folder)
    run = trained_run.open_run("runs/tiny")
    monkeypatch.chdir(tmp_path)
    assert run.describe() == "runs/tiny at step 12" and len(run.metrics()) > 0
    (tmp_path / "other").mkdir()
    stored = {"model.name": "decoder_lm", "train.objective": "language_modeling", "data.tokenizer": "tokenizer.json"}
    (tmp_path / "other" / "config.json").write_text(json.dumps(stored))
    monkeypatch.setattr(trained_run, "TrainedRun", lambda address, config: (str(address), config.data.tokenizer))
    assert trained_run.open_run("other") == ("other", f"{tmp_path}/other/tokenizer.json")


def test_a_run_without_metrics_as_an_import_is_has_no_lines(folder, tmp_path):
    for name in ("config.json", "checkpoints"):
        (tmp_path / name).symlink_to(folder / "whole" / name)
    run = trained_run.open_run(tmp_path)
    assert [run.metrics(kind) for kind in trained_run.KINDS] == [[], [], []]
    with pytest.raises(ValueError, match="has no lines of the kind 'votes'; it has none"):
        run.metrics("votes")


def test_numbers_of_numpy_become_those_of_python():
    given = {"max_tokens": np.int8(20), "temperature": np.float16(0.5), "top_k": np.int64(3), "seed": np.int32(5)}
    how = trained_run._numbers(**given)
    assert how == {"max_tokens": 20, "temperature": 0.5, "top_k": 3, "seed": 5}
    assert [type(value) for value in how.values()] == [int, float, int, int]
    assert trained_run._numbers(max_tokens=None) == {"max_tokens": None}


def test_a_run_in_a_bucket_is_not_opened():
    with pytest.raises(ConfigError, match=r"gs://bucket/run: only a local folder can be opened"):
        trained_run.open_run("gs://bucket/run")


def test_a_stream_is_the_text_of_generate_in_parts(folder):
    run = trained_run.open_run(folder / "runs" / "tiny")
    [text] = run.generate(["1 is"], max_tokens=np.int8(9), seed=np.int32(3))
    parts = list(run.stream("1 is", max_tokens=9, seed=3))
    assert "".join(parts) == text and len(parts) > 5
    with pytest.raises(ConfigError, match="was not trained on conversations"):
        next(run.stream(message="hi"))


@pytest.mark.slow
def test_a_command_says_by_which_checkpoint_it_answers(folder):
    record = folder / "whole" / "config.json"
    content = record.read_text()
    record.write_text(json.dumps(json.loads(content) | {"train.steps": 99}))
    given = (f"--workdir={folder}/whole", "--max_tokens=2", "--prompt=1 is")
    status, _, err = finish(command("generate.py", *given, cache=folder))
    record.write_text(content)
    assert status == 0 and err == f"{folder}/whole at step 12 of 99, not finished\n"


@pytest.mark.slow
def test_the_prompt_that_is_suggested_is_of_the_users_own_text(folder, whole):
    config = trained_run.open_run(folder / "runs" / "tiny").config
    config.data.path = str(folder / "texts/*.txt")
    config.data.cache_dir = str(folder / "torus")
    corpus = corpora.prepare(config.data, vocab_size=256, vocab_size_typed=True, announce=lambda line: None)
    assert re.fullmatch(r"\d+ is ", opening(corpus, 32))
    assert f"--prompt='{opening(corpus, 32)}'" in whole


@pytest.mark.slow
def test_a_command_scores_questions_as_the_run_computes_them(folder):
    run = trained_run.open_run(folder / "runs" / "tiny")
    items = [
        {"question": "6 is 2 times", "choices": ["3;", "a longer choice"], "answer": 0},
        {"prompt": "12 is", "exact": "not this", "max_tokens": 4},
        {"text": "12 is 3 times 4; " * 4},
    ]
    (folder / "mine.jsonl").write_text("\n".join(map(json.dumps, items)))
    given = (f"--workdir={folder}/whole", f"--questions={folder}/mine.jsonl", f"--results={folder}/results.jsonl")
    status, out, err = finish(command("score.py", *given, cache=folder))
    assert status == 0 and err == f"{folder}/whole at step 12; each item: {folder}/results.jsonl\n"
    choice, answer, text = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    tokens = [run.tokenizer.end_of_document, *b"6 is 2 times 3;"]
    logits = run.logits(np.array([tokens]))[0].astype(np.float64)
    expected = sum(logits[n - 1, tokens[n]] - np.log(np.exp(logits[n - 1]).sum()) for n in (-3, -2, -1))
    assert choice["log_likelihoods"][0] == pytest.approx(expected, abs=1e-2) and choice["chosen"] == 0
    [generated] = run.generate(["12 is"], max_tokens=4, temperature=0.0)
    assert "12 is" + answer["generated"] == generated.partition("\n")[0] and answer["exact_match"] == 0
    assert text["tokens"] == text["bytes"] == 68 and text["words"] == 20  # more than model.max_length=32
    rows = [line.split() for line in out.splitlines()]
    assert ["mine", "acc", "1.0000", "-", "1"] in rows and ["mine", "exact_match", "0.0000", "-", "1"] in rows
    [bits] = [float(value) for _, name, value, *_ in rows if name == "bits_per_byte"]
    assert bits == pytest.approx(-text["log_likelihood"] / np.log(2) / 68, abs=1e-4)


@pytest.mark.parametrize("recipe", ["digits", "meta_sinusoid", "meta_in_context", "trm/sudoku_mini"])
def test_a_model_of_numbers_has_no_tokenizer_for_a_prompt(recipe):
    config = loading.load(f"configs/{recipe}.py", "", {}).config
    with pytest.raises(ConfigError, match="runs/x was not trained on text, so it has no tokenizer"):
        trained_run.tokenizer_of("runs/x", config)
