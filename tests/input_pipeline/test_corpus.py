# SPDX-License-Identifier: Apache-2.0
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from input_pipeline.cache import cache_folder
from input_pipeline.corpus import prepare_to_evaluate
from input_pipeline.errors import DataError


def test_the_digest_is_the_same_wherever_the_same_documents_are(corpus, texts, tmp_path):
    elsewhere = tmp_path / "elsewhere" / "deeper"
    shutil.copytree(texts, elsewhere, copy_function=shutil.copyfile)
    one = corpus()
    other = corpus(path=str(elsewhere), cache_dir=str(tmp_path / "another"))
    assert one.digest == other.digest and one.unigram_bits_per_byte == other.unigram_bits_per_byte
    assert 0 < one.unigram_bits_per_byte < 8


def test_a_synthetic_corpus_has_windows_and_no_text(corpus):
    ready = corpus(source="synthetic", vocab_size=97)
    assert ready.tokenizer is None and ready.unigram_bits_per_byte is None
    for windows in (*ready.train.parts, ready.heldout):
        assert windows.read(np.arange(3), 8)["tokens"].max() < 97
    assert ready.digest != corpus(source="synthetic", vocab_size=98).digest


def test_a_small_corpus_gets_the_pieces_that_it_has(corpus):
    lines = []
    for _ in range(2):
        ready = corpus(tokenizer="sentencepiece", vocab_size=5000, announce=lines.append)
    (said, again) = [line for line in lines if "give only" in line]
    number = ready.tokenizer.vocab_size
    assert said == again and said.endswith(f"give only {number:,} pieces, not model.vocab_size=5000; using {number:,}")
    with pytest.raises(DataError, match=rf"not model.vocab_size=5000; use --config.model.vocab_size={number},"):
        corpus(tokenizer="sentencepiece", vocab_size=5000, vocab_size_typed=True)
    assert corpus(tokenizer="sentencepiece", vocab_size=number, vocab_size_typed=True).digest == ready.digest


def test_bytes_leave_room_in_a_larger_vocabulary_without_a_word(corpus):
    lines = []
    assert corpus(vocab_size=4096, vocab_size_typed=True, announce=lines.append).tokenizer.vocab_size == 256
    assert len(lines) == 1 and lines[0].startswith("tokenized 39 documents, ")


def test_held_out_documents_of_their_own(corpus, texts, tmp_path):
    split = corpus()
    (tmp_path / "heldout.jsonl").write_text('{"text": "one document"}\n{"text": "and another"}\n')
    own = corpus(source="auto", validation_path=str(tmp_path / "heldout.jsonl"))
    assert own.heldout.num_documents == 2 and own.heldout.num_bytes == len("one documentand another")
    assert own.train.num_tokens == split.train.num_tokens + split.heldout.num_tokens
    assert 0 < own.unigram_bits_per_byte != split.unigram_bits_per_byte
    again = corpus(source="auto", validation_path=str(tmp_path / "heldout.jsonl"), holdout_fraction=0.9)
    assert again.digest == own.digest != split.digest


def test_the_cache_is_where_the_user_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("") == tmp_path / "xdg" / "torus"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder("") == tmp_path / "home" / ".cache" / "torus"
    assert cache_folder("~/mine") == tmp_path / "home" / "mine" and cache_folder(str(tmp_path / "here")).is_dir()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "EMPTY"}, "there is no text"),
        ({"cache_dir": "EMPTY"}, "data.cache_dir=.*: File exists; name a writable folder"),
        ({"tokenizer": "byte", "vocab_size": 100}, "model.vocab_size=100 is less than the 256 ids"),
        ({"validation_path": "EMPTY"}, "data path '.*empty' .*: there is no text"),
        ({"validation_path": "nowhere"}, "data path 'nowhere': no such file or folder"),
        ({"path": "", "mixture": "1 nowhere; 1 EMPTY"}, "data path 'nowhere': no such file or folder"),
        ({"path": "", "mixture": "1 nowhere; EMPTY"}, "data.mixture: 'EMPTY' is not a weight and a path"),
        ({"source": "nowhere"}, "data.source=nowhere does not exist; use"),
        ({"holdout_fraction": 0}, "data.holdout_fraction=0 is not between 0 and 1"),
        ({"source": "synthetic", "vocab_size": 2}, "model.vocab_size=2 is too small for data.source=synthetic"),
    ],
)
def test_errors_are_one_line(corpus, tmp_path, changes, message):
    (tmp_path / "empty").write_text("")
    changes = {key: str(tmp_path / "empty") if value == "EMPTY" else value for key, value in changes.items()}
    with pytest.raises(DataError, match=message) as caught:
        corpus(**changes)
    assert "\n" not in str(caught.value) and caught.value.exit_status == 2


def test_the_room_imports_no_other_and_no_jax():
    root = Path(__file__).parents[2]
    for path in (root / "input_pipeline").rglob("*.py"):
        imported = set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
        ours = {entry.stem for entry in root.iterdir() if entry.suffix == ".py" or entry.is_dir()} - {
            "input_pipeline",
            "files",
        }
        assert not imported & (ours | {"jax", "flax", "optax", "torch"}), path.name
        assert "tensorflow" not in imported or path.name == "tensorflow_import.py"
        assert "datasets" not in imported or path.name == "hugging_face.py"


def test_what_is_held_out_is_trained_on_nowhere(corpus, tmp_path):
    """Neither if the validation set is part of the training data, nor if another part of a mixture contains it."""
    folder = tmp_path / "parts"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"document {number} " * 9)
    said = []
    own = corpus(path=str(folder), validation_path=str(folder / "3.txt"), announce=said.append)
    assert own.train.parts[0].num_documents == 11 and own.heldout.num_documents == 1
    assert any("not trained on 1 documents that are held out elsewhere" in line for line in said)
    mixed = corpus(path="", mixture=f"1 {folder}; 1 {folder / '3.txt'}")
    first, second = mixed.train.parts
    assert (first.num_documents, second.num_documents) == (12 - mixed.heldout.num_documents, 1)
    with pytest.raises(DataError, match="all documents are held out elsewhere; add others"):
        corpus(path=str(folder / "3.txt"), validation_path=str(folder))


def test_a_corpus_goes_on_with_the_weights_and_skips_of_a_record(corpus):
    ready = corpus()
    rolled_back = replace(ready, train=ready.train.skip(8, 24))
    record = {"examples": 16, "mixture": rolled_back.train.record(), "skips": rolled_back.train.skips}
    assert ready.resume(json.loads(json.dumps(record))).train == rolled_back.train
    without = {key: value for key, value in record.items() if key != "skips"}
    assert rolled_back.resume(without).train == ready.train  # of a run from before there were skips


def test_the_training_documents_are_kept_in_stored_order_where_asked_for(corpus, texts):
    assert corpus().documents is None and corpus().names == (str(texts),)
    kept = corpus(with_documents=True)
    (documents,) = kept.documents
    (windows,) = kept.train.parts
    assert len(documents) == windows.num_documents
    stream = windows.read(np.arange(windows.num_examples(64)), 64)["targets"].ravel()[: windows.num_tokens]
    assert bytes(stream.astype(np.uint8)) == b"".join(Path(one.name).read_bytes() + b"\0" for one in documents)


def test_other_data_is_evaluated_whole(section, texts):
    documents = [path for path in texts.rglob("*.txt") if path.stat().st_size]
    whole = prepare_to_evaluate(section(), vocab_size=256, announce=lambda line: None)
    assert whole.heldout.num_documents == len(documents) and whole.train.parts == ()
    validation = section(path="nowhere", validation_path=str(documents[0]))
    assert prepare_to_evaluate(validation, vocab_size=256, announce=lambda line: None).heldout.num_documents == 1
