# SPDX-License-Identifier: Apache-2.0
"""A start reads no unchanged files again, and trusts nothing that it cannot know to be unchanged."""

import json
import os
import time

import numpy as np
import pytest

from input_pipeline import preparations
from input_pipeline.errors import DataError
from input_pipeline.reading import documents


@pytest.fixture(autouse=True)
def _trust_new_files(monkeypatch):
    monkeypatch.setattr(preparations, "RECENT_NS", 0)


@pytest.fixture
def count_reads(monkeypatch):
    """Return a list that a document joins each time it is read whole."""
    read, whole = [], documents._whole

    def counted(document):
        read.append(document.name)
        return whole(document)

    monkeypatch.setattr(documents, "_whole", counted)
    return read


@pytest.fixture
def reads(count_reads, corpus):
    """Prepare the corpus; return (it, how many documents were read)."""

    def prepared(**changes):
        count_reads.clear()
        return corpus(**changes), len(count_reads)

    return prepared


def same(one, other) -> bool:
    """Return whether two corpora have the same windows."""
    return one.digest == other.digest and all(
        np.array_equal(value, other.train.parts[0].read(np.arange(5), 64)[name])
        for name, value in one.train.parts[0].read(np.arange(5), 64).items()
    )


@pytest.mark.parametrize("tokenizer", ["byte", "sentencepiece"])
def test_unchanged_files_are_not_read_again(reads, tokenizer):
    first, at_first = reads(tokenizer=tokenizer, vocab_size=300)
    again, then = reads(tokenizer=tokenizer, vocab_size=300)
    assert at_first >= 39 and then == 0
    assert same(first, again) and first.tokenizer.digest == again.tokenizer.digest


def test_every_kind_of_change_reads_the_files_again(reads, texts):
    first, _ = reads()
    one = texts / "01.txt"
    content, state = one.read_bytes(), one.stat()

    one.write_bytes(content[::-1])
    os.utime(one, ns=(state.st_atime_ns, state.st_mtime_ns))  # same size, same time of modification
    changed, number = reads()
    assert number and not same(first, changed)

    one.write_bytes(content)
    back, number = reads()
    assert number and same(first, back)

    (texts / "99.txt").write_text("one more\n")
    more, number = reads()
    assert number and not same(first, more)
    (texts / "99.txt").unlink()
    assert same(first, reads()[0])

    one.replace(texts / "new.txt")
    (texts / "new.txt").replace(one)
    assert reads()[1]  # a file that was renamed may be another one

    assert reads(holdout_fraction=0.3)[1] and reads(bad_documents="skip")[1]
    assert reads()[1] == reads(vocab_size=300)[1] == 0  # the vocabulary of given tokens depends on nothing


def test_a_file_that_was_written_to_just_now_is_read_again(reads, monkeypatch):
    """A second write within the resolution of the file system's clock would leave the same times."""
    monkeypatch.setattr(preparations, "RECENT_NS", 3600 * 10**9)
    assert reads()[1] and reads()[1]
    monkeypatch.setattr(preparations, "RECENT_NS", 0)
    assert reads()[1] and not reads()[1]


def test_a_clock_that_went_back_trusts_no_file(reads, monkeypatch):
    reads()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert reads()[1]


def test_another_version_of_the_code_reads_the_files_again(reads, monkeypatch):
    reads()
    monkeypatch.setattr(preparations, "CODE", "another")
    assert reads()[1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"\0" * path.stat().st_size),
        lambda path: path.unlink(),
        lambda path: (path.parent / "manifest.json").write_text("{}"),
    ],
    ids=["changed", "missing", "no manifest"],
)
def test_damaged_shards_are_made_again_of_the_documents(reads, tmp_path, damage):
    first, _ = reads()
    damage(next((tmp_path / "cache" / "shards").glob("*/train-*.bin")))
    again, number = reads()
    assert number and same(first, again) and not reads()[1]


def test_a_manifest_of_other_shards_is_an_error_as_without_a_preparation(reads, tmp_path):
    reads()
    (manifest,) = (tmp_path / "cache" / "shards").glob("*/manifest.json")
    manifest.write_text(manifest.read_text().replace('"end_of_document": 0', '"end_of_document": 1'))
    with pytest.raises(DataError, match="made with another end_of_document"):
        reads()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"tokenizer": "byte", "shards": [["none", ""]], "notes": []}'])
def test_a_damaged_record_of_a_preparation_is_as_none(reads, tmp_path, content):
    first, _ = reads()
    (record,) = (tmp_path / "cache" / "preparations").iterdir()
    record.write_bytes(content)
    again, number = reads()
    assert number and same(first, again) and not reads()[1]


def test_a_trained_tokenizer_that_is_gone_is_trained_again(reads, tmp_path):
    first, _ = reads(tokenizer="sentencepiece", vocab_size=300)
    for path in (tmp_path / "cache" / "tokenizers").glob("*.model"):
        path.write_bytes(b"damaged")
    again, number = reads(tokenizer="sentencepiece", vocab_size=300)
    assert number and same(first, again)


def test_lines_about_the_documents_are_announced_at_each_start(corpus, texts):
    (texts / "empty.txt").touch()
    (texts / "latin.txt").write_bytes(b"caf\xe9\n")
    first, then = [], []
    for lines in (first, then):
        corpus(bad_documents="skip", tokenizer="sentencepiece", vocab_size=5000, announce=lines.append)
    notes = [line for line in first if line.startswith(("skipped 2 of 41 documents", "the documents give only"))]
    assert then == notes and len(notes) == 2


def test_parts_and_validation_are_known_too(corpus, count_reads, texts, tmp_path):
    (tmp_path / "other.jsonl").write_text("".join(json.dumps({"text": f"line {k}"}) + "\n" for k in range(30)))
    (tmp_path / "heldout.jsonl").write_text('{"text": "line 3"}\n{"text": "held out"}\n')
    how = dict(
        source="auto", path="", mixture=f"0.5 {texts}; 0.5 {tmp_path}/other.jsonl",
        validation_path=str(tmp_path / "heldout.jsonl"),
    )  # fmt: skip
    lines, first = [], corpus(**how)
    count_reads.clear()
    assert same(first, corpus(announce=lines.append, **how)) and not count_reads
    assert lines == [f"{tmp_path}/other.jsonl: not trained on 1 documents that are held out elsewhere"]
    (tmp_path / "heldout.jsonl").write_text('{"text": "line 3"}\n{"text": "HELD OUT"}\n')
    assert not same(first, corpus(**how)) and count_reads


def test_what_is_read_through_a_link_is_known_by_its_file(corpus, texts):
    """The two files have the same size, and may have the same times."""
    for name in ("one", "two"):
        (texts.parent / name).mkdir()
        (texts.parent / name / "a.txt").write_text(f"{name} and others\n" * 9)
    link = texts.parent / "link"
    link.symlink_to("one")
    first = corpus(path=str(link))
    link.unlink()
    link.symlink_to("two")
    assert not same(first, corpus(path=str(link)))


def test_files_that_change_while_they_are_read_are_not_taken_for_known(reads, texts, monkeypatch):
    path_of, asked = preparations.path_of, []

    def replaced(*arguments):
        asked.append(path_of(*arguments))
        if len(asked) == 2:
            (texts / "01.txt").write_text("changed\n")
            asked[1] = path_of(*arguments)
        return asked[-1]

    monkeypatch.setattr(preparations, "path_of", replaced)
    reads()
    assert asked[0] != asked[1] and not (texts.parent / "cache" / "preparations").exists()


def test_a_manifest_that_lacks_a_part_is_not_used(reads, tmp_path):
    first, _ = reads()
    (path,) = (tmp_path / "cache" / "shards").glob("*/manifest.json")
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"splits": {"train": manifest["splits"]["train"]}}))
    again, number = reads()
    assert number and same(first, again)


def test_another_version_of_a_library_reads_the_files_again(monkeypatch):
    known = preparations._digest_of_code()
    assert known == preparations.CODE
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0")
    assert preparations._digest_of_code() != known


def test_a_trained_tokenizer_that_cannot_be_read_is_trained_again_or_named_in_a_line(reads, tmp_path):
    reads(tokenizer="sentencepiece", vocab_size=300)
    (path,) = (tmp_path / "cache" / "tokenizers").glob("*.model")
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match="Is a directory"):
        reads(tokenizer="sentencepiece", vocab_size=300)


def test_names_of_documents_that_changed_are_refused(corpus, monkeypatch, texts):
    """The list of documents is read again, and attributed to what was trained on."""
    from input_pipeline.texts import Texts

    stores = Texts.stores

    def changed_after(self, *arguments):
        made = stores(self, *arguments)
        (texts / "99.txt").write_text("one more\n")
        return made

    monkeypatch.setattr(Texts, "stores", changed_after)
    with pytest.raises(DataError, match="the documents have changed"):
        corpus(with_documents=True)


def test_documents_by_name_are_those_of_the_shards(corpus):
    first, again = (corpus(with_documents=True) for _ in range(2))
    assert [one.name for one in first.documents[0]] == [one.name for one in again.documents[0]]
    assert len(again.documents[0]) == again.train.parts[0].num_documents


def test_a_cache_that_another_user_owns_keeps_nothing(reads, tmp_path, monkeypatch):
    def refused(path, content):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(preparations, "write_atomically", refused)
    first, _ = reads()
    again, number = reads()
    assert number and same(first, again)


def test_documents_without_files_are_read_at_each_start(reads, monkeypatch):
    """As of a dataset in memory, whose content no file's time tells."""
    from input_pipeline import sources

    of_files = sources._documents
    monkeypatch.setattr(sources, "_documents", lambda *how: sources.FromFiles([], of_files(*how).documents))
    assert reads()[1] and reads()[1]
