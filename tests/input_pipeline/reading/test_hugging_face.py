# SPDX-License-Identifier: Apache-2.0
"""Hugging Face datasets: any form of them is the same corpus, and what is wrong is one line."""

import json
import sys
from pathlib import Path

import pytest

from input_pipeline.errors import DataError
from input_pipeline.reading.documents import scan
from input_pipeline.sources import read_source
from tests.test_train import command, finish

ROOT = Path(__file__).parents[3]
TEXTS = [f"document {number}\n" * 40 for number in range(70)]
SECRET = "hf_aSecretThatNobodyMayKeep"


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The library, its caches below tmp_path, and no network."""
    library = pytest.importorskip("datasets", reason="the extra `huggingface` is not installed")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    return library


@pytest.fixture
def read(section):
    def read(path, **changes):
        data = section(source="huggingface", path=str(path), **changes)
        return ["".join(span.text()) for span in scan(read_source(data, vocab_size=256, seed=0))]

    return read


def test_every_form_of_a_dataset_gives_its_documents(datasets, read, tmp_path):
    whole = datasets.Dataset.from_dict({"id": list(range(70)), "text": TEXTS})
    parts = datasets.DatasetDict({"train": whole.select(range(50)), "validation": whole.select(range(50, 70))})
    whole.save_to_disk(tmp_path / "one")
    parts.save_to_disk(tmp_path / "parts")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    assert read(tmp_path / "one") == TEXTS and read(tmp_path / "files") == TEXTS
    assert read(tmp_path / "parts") == TEXTS[:50]
    assert read(f"{tmp_path / 'parts'}:validation") == TEXTS[50:]
    assert read(f"{tmp_path / 'parts'}:train[10:20]") == TEXTS[10:20]
    assert read(f"{tmp_path / 'one'}:train[:50%]") == TEXTS[:35]
    for place, message in (("one:validation", "Unknown split"), ("parts:test", "Unknown split")):
        with pytest.raises(DataError, match=message):
            read(f"{tmp_path}/{place}")


@pytest.mark.slow
def test_of_a_part_of_a_dataset_on_the_hub_only_the_files_that_have_it_are_read(datasets, read, tmp_path, monkeypatch):
    """The hub is a folder of files here; the last would fail. What was read is kept.

    The library reads a file ahead.
    """
    for number, texts in enumerate((TEXTS[:30], TEXTS[30:60], TEXTS[60:])):
        rows = [json.dumps({"text": text, "url": None}) + "\n" for text in texts]
        (tmp_path / f"train-{number}.jsonl").write_text("".join(rows))
    (tmp_path / "train-3.jsonl").write_text("no JSON")
    load, asked = datasets.load_dataset, []

    def from_the_hub(name, subset, **how):
        asked.append((name, subset, how))
        return load("json", data_files=sorted(map(str, tmp_path.glob("*.jsonl"))), **how)

    monkeypatch.setattr(datasets, "load_dataset", from_the_hub)
    assert read("some/texts:train[:50]", subset="en") == TEXTS[:50]
    assert asked == [("some/texts", "en", {"split": "train", "streaming": True})]
    assert read("some/texts:train[:50]", subset="en") == TEXTS[:50] and len(asked) == 1
    with pytest.raises(DataError, match=r"split 'train\[:50\]': no column 'body'; it has 'text', 'url'"):
        read("some/texts:train[:50]", field="body")
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"data path 'nobody/nothing', split 'train\[:50\]': (?!An error)"):
        read("nobody/nothing:train[:50]")


def test_a_dataset_is_the_corpus_of_its_documents(datasets, corpus, tmp_path):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "one")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    one = corpus(source="huggingface", path=str(tmp_path / "one"))
    assert one.digest == corpus(source="auto", path=str(tmp_path / "a.jsonl")).digest


def test_what_is_not_there_is_one_line(datasets, read, tmp_path):
    datasets.Dataset.from_dict({"body": ["x", None], "n": [1, 2]}).save_to_disk(tmp_path / "one")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "nothing").mkdir()
    for path, changes, message in [
        ("one", {}, "split 'train': no column 'text'; it has 'body', 'n'; choose one with --config.data.field"),
        ("one", {"field": "n"}, "column 'n' has the type int64, not text; choose another with --config.data.field"),
        ("one", {"field": "body"}, "one, row 2: without text in 'body' (null). Fix the file"),
        ("files:test", {}, "split 'test': "),
        ("files", {"subset": "other"}, "subset 'other': "),
        ("nothing", {}, "data path"),
        ("missing", {}, "data path"),
    ]:
        with pytest.raises(DataError) as caught:
            read(tmp_path / path, **changes)
        assert message in str(caught.value) and "\n" not in str(caught.value)
    for name in ("nobody/nothing", "nobody/nothing/at/all"):
        with pytest.raises(DataError, match=f"^data path '{name}', split 'train': "):
            read(name)


def test_without_the_extra_it_says_how_to_install_it(read, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="needs the package datasets: run `make setup EXTRAS=huggingface`"):
        read("some/name")


@pytest.mark.slow
def test_the_token_is_kept_nowhere(datasets, tmp_path, monkeypatch):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    small = {
        "model.num_layers": 1, "model.embed_dim": 16, "model.num_heads": 1, "model.num_kv_heads": 1,
        "model.mlp_dim": 16, "model.vocab_size": 256, "train.sequence_length": 16, "train.global_batch": 2,
        "train.steps": 2, "data.tokenizer": "byte", "data.source": "huggingface", "data.path": tmp_path / "files",
    }  # fmt: skip
    flags = [f"--workdir={tmp_path / 'run'}", *(f"--config.{key}={value}" for key, value in small.items())]
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_TOKEN", SECRET)
    status, out, err = finish(command("train.py", *flags, cache=tmp_path / "cache"))
    assert status == 0, err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.json", "train_worker_0.out", "metrics.jsonl"} <= {path.name for path in files}
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in out + err
