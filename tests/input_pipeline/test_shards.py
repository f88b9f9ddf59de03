# SPDX-License-Identifier: Apache-2.0
"""The store: built once by one process, taken up where it stopped, rebuilt where it is not what it was."""

import copy
import io
import json
import os
import re
import shutil
import signal
import tracemalloc
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from input_pipeline import progress, shards
from input_pipeline.batches import training_batches
from input_pipeline.cache import digest
from input_pipeline.errors import DataError, DataLost
from input_pipeline.mixture import Mixture
from tests import warm

SCRIPT = """
import os, signal, sys
from ml_collections import ConfigDict
from input_pipeline import corpus, shards, tokenization
shards.SHARD_BYTES, stop_after = 3_000, int(sys.argv[3])
write_shard = shards._write_shard
def stopping(*arguments):
    global stop_after
    if stop_after == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    stop_after -= 1
    return write_shard(*arguments)
shards._write_shard = stopping
data = ConfigDict(dict(
    source="text", path=sys.argv[1], field="text", tokenizer="sentencepiece", cache_dir=sys.argv[2],
    holdout_fraction=0.2, max_document_mib=256, mixture="", stream="", validation_path="", bad_documents="error"))
print(corpus.prepare(data, vocab_size=300, vocab_size_typed=False).digest)
"""


def start(texts, cache, stop_after):
    """Prepare the corpus in a process of its own, which is killed before shard number stop_after."""
    return warm.start(["-c", SCRIPT, texts, cache, stop_after], dict(os.environ))


@pytest.fixture
def store(monkeypatch, tmp_path):
    """Make small shards, and list the files of the cache: name -> (inode, time of writing)."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 3_000)

    def files(pattern="*", cache="cache"):
        found = (tmp_path / cache / "shards").glob(f"*/{pattern}")
        return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}

    return files


def read_all(windows, length=50):
    """Return the windows of a split in their stored order."""
    (windows,) = windows.parts if isinstance(windows, Mixture) else (windows,)
    return windows.read(np.arange(windows.num_examples(length)), length)


def test_the_stored_tokens_are_the_documents(corpus, store, texts):
    """Shards hold the documents in the order of the source, wherever they are divided."""
    ready = corpus(vocab_size=300, tokenizer="sentencepiece")
    assert len(store("train-*.bin")) > 3
    contents = {path.read_text() for path in texts.rglob("*.txt")} - {""}
    documents = []
    for windows in (*ready.train.parts, ready.heldout):
        batch = read_all(windows)
        stream = batch["targets"][batch["segments"] > 0]
        ends = np.flatnonzero(stream == ready.tokenizer.end_of_document)
        found = [ready.tokenizer.decode(part.tolist()) for part in np.split(stream, ends + 1)[:-1]]
        assert ends[-1] == len(stream) - 1 and len(stream) == windows.num_tokens
        assert windows.num_documents == len(found) and windows.num_bytes == sum(map(len, found))
        documents += found
    assert len(documents) == 39 and set(documents) == contents


def test_a_long_document_is_cut_over_shards(corpus, store, tmp_path):
    text = "".join(f"{number} bottles\n" for number in range(2_000))
    (tmp_path / "long.txt").write_text(text)
    ready = corpus(path=str(tmp_path / "long.txt"))
    assert len(store("train-*.bin")) > 3 and ready.train.parts[0].num_documents == ready.heldout.num_documents == 1
    parts = [
        ready.tokenizer.decode(read_all(windows)["targets"].ravel().tolist())
        for windows in (ready.train, ready.heldout)
    ]
    assert "".join(part.rstrip("\0") for part in parts) == text
    assert read_all(ready.train)["segments"].max() == 1


def test_what_is_there_is_used_again(corpus, store):
    first = corpus()
    files = store()
    again = corpus(announce=pytest.fail)
    assert store() == files and "manifest.json" in files
    assert again.digest == first.digest and again.unigram_bits_per_byte == first.unigram_bits_per_byte


def test_the_digest_of_the_documents_is_that_of_their_keys_end_to_end_and_needs_no_room_for_them():
    splits = {"train": [types.SimpleNamespace(key=b"k" * 100_000)] * 99, "heldout": [types.SimpleNamespace(key=b"h")]}
    tracemalloc.start()
    facts = shards.facts_of(splits, types.SimpleNamespace(digest="", end_of_document=0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert facts["documents"] == digest(b"train", b"k" * 9_900_000, b"heldout", b"h") and peak < 100_000


def test_a_changed_document_builds_another_store(corpus, store, texts):
    first, lines = corpus(), []
    (texts / "01.txt").write_text("something else\n")
    assert corpus(announce=lines.append).digest != first.digest and len(lines) == 1
    assert corpus(holdout_fraction=0.3).digest != first.digest
    assert len({path.parent for path in texts.parent.glob("cache/shards/*/manifest.json")}) == 3


@pytest.mark.parametrize("tokenizer", ["byte", "sentencepiece"])
def test_nothing_is_kept_of_documents_that_change_while_they_are_read(corpus, store, texts, tokenizer, monkeypatch):
    known = {path: path.read_text() for path in sorted(texts.rglob("*.txt"))}
    write = shards._write_shard

    def spoil(line="training a SentencePiece"):
        if line.startswith("training a SentencePiece"):
            for path, text in known.items():
                path.write_text("x" * len(text))

    def write_too_late(*arguments):
        spoil()
        return write(*arguments)

    options = {"vocab_size": 300, "tokenizer": tokenizer}
    with monkeypatch.context() as patched, pytest.raises(DataError, match="changed while it was being read"):
        patched.setattr(shards, "_write_shard", write_too_late)
        corpus(**options, announce=spoil)
    for path, text in known.items():
        path.write_text(text)
    ready = corpus(**options)
    fresh = corpus(**options, cache_dir=str(texts.parent / "fresh"))
    assert ready.digest == fresh.digest
    for windows, expected in zip((*ready.train.parts, ready.heldout), (*fresh.train.parts, fresh.heldout), strict=True):
        np.testing.assert_equal(read_all(windows), read_all(expected))


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-4])


def _flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_truncate, _flip_a_bit, Path.unlink])
@pytest.mark.parametrize("name", ["train-00001.bin", "heldout-00000.offsets", "train-00000.json", "manifest.json"])
def test_a_damaged_file_is_built_again_and_no_other(corpus, store, tmp_path, damage, name):
    first, files = corpus(), store("*.bin")
    before = read_all(first.train)
    (path,) = (tmp_path / "cache" / "shards").glob(f"*/{name}")
    if damage is _flip_a_bit and path.suffix == ".json":
        path.write_text(path.read_text().replace('"', "'"))
    else:
        damage(path)
    again = corpus()
    assert again.digest == first.digest
    assert all(np.array_equal(values, before[key]) for key, values in read_all(again.train).items())
    after = store("*.bin")
    assert {shard for shard in files if after[shard] != files[shard]} <= {Path(name).stem + ".bin"}


def test_a_finished_store_without_digests_of_its_text_is_not_read_again(corpus, store, tmp_path):
    """Earlier versions wrote none; the manifest is written once the documents were checked."""
    first, files = corpus(), store("*.bin")
    for path in (tmp_path / "cache" / "shards").glob("*/*.text"):
        path.unlink()
    (path,) = (tmp_path / "cache" / "shards").glob("*/train-00001.bin")
    _flip_a_bit(path)
    assert corpus().digest == first.digest
    after = store("*.bin")
    assert {shard for shard in files if after[shard] != files[shard]} == {"train-00001.bin"}


@pytest.mark.parametrize("suffix", ["bin", "offsets"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_truncate, "has [0-9,]+ bytes, not [0-9,]+"),
        (_flip_a_bit, "their content does not match their digest"),
        (Path.unlink, "is missing"),
    ],
)
def test_a_damaged_shard_is_named_when_it_is_built_again(corpus, store, tmp_path, suffix, damage, said):
    corpus()
    (path,) = (tmp_path / "cache" / "shards").glob(f"*/train-00001.{suffix}")
    damage(path)
    lines = []
    corpus(announce=lines.append)
    named = f"{path.parent}/train-00001.bin, .offsets" if damage is _flip_a_bit else str(path)
    assert re.fullmatch(re.escape(named) + f": {said}; rebuilding it", lines[0])
    assert len(lines) == 2 and lines[1].startswith("tokenized 39 documents")


def _overwrite(path):
    with path.open("r+b") as file:
        file.write(b"other")


def _replace(path):
    shutil.copy2(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").rename(path)


DAMAGES = {  # and what is said of them
    "truncated": (_truncate, "changed its size from [0-9,]+ to [0-9,]+ bytes since this run opened it"),
    "emptied": (lambda path: os.truncate(path, 0), "changed its size from [0-9,]+ to 0 bytes since this run opened it"),
    "overwritten": (_overwrite, "was written to since this run opened it"),
    "gone": (Path.unlink, "is missing"),
    "gone with all others": (lambda path: path.parent.rename(path.parents[2] / "moved"), "is missing"),
}


def batches_of(mixture, readers=2, num_steps=60):
    return training_batches(
        mixture, seed=0, sequence_length=50, global_batch=16, rows=np.arange(16), first_example=0,
        num_steps=num_steps, readers=readers, prefetch=2,
    )  # fmt: skip


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_a_shard_that_changes_under_a_run_is_built_again_and_the_run_goes_on(corpus, store, tmp_path, damage, said):
    """To the same tokens. Of the threads that read ahead one builds it."""
    ready, lines = corpus(), []
    wanted = list(batches_of(ready.train))
    ready.announce_rebuilds_to(lines.append)
    batches = batches_of(ready.train, readers=4)
    found = [next(batches)]
    (path,) = (tmp_path / "cache" / "shards").glob("*/train-00001.bin")
    damage(path)
    found += batches
    assert len(found) == len(wanted)
    assert all(
        np.array_equal(batch[key], other[key]) for batch, other in zip(found, wanted, strict=True) for key in batch
    )
    named = re.escape(str(path)) if said != "is missing" else r"\S+/train-\d{5}.bin"
    assert re.fullmatch(f"{named}: {said}; rebuilding it from its documents", lines[0])
    assert lines[-1].startswith("tokenized 39 documents") and sum("from its documents" in line for line in lines) == 1
    assert (read_all(corpus(announce=pytest.fail).train)["segments"] > 0).sum() == ready.train.num_tokens


def test_a_shard_that_another_process_has_built_again_is_read_on(corpus, store, tmp_path):
    """Nothing is built, nor read of the documents, which may be gone."""
    ready = corpus()
    wanted = read_all(ready.train)
    for path in (tmp_path / "cache" / "shards").glob("*/*-*.bin"):
        _replace(path)
    shutil.rmtree(tmp_path / "texts")
    ready.announce_rebuilds_to(pytest.fail)
    assert all(np.array_equal(values, wanted[key]) for key, values in read_all(ready.train).items())


def test_of_two_that_share_a_cache_one_builds_a_shard_again(corpus, store, tmp_path):
    """Each has opened the shards by itself; the lock is one of files, as between processes."""
    both, lines = (corpus(), corpus()), []
    wanted = read_all(both[0].train)
    for each in both:
        each.announce_rebuilds_to(lines.append)
    for path in (tmp_path / "cache" / "shards").glob("*/*-*.bin"):
        path.unlink()
    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(lambda each: read_all(each.train), both):
            assert all(np.array_equal(values, wanted[key]) for key, values in found.items())
    assert sum("rebuilding it from its documents" in line for line in lines) == 1, lines


def test_the_starts_of_documents_are_built_again_too(corpus, store, tmp_path, monkeypatch):
    """What is damaged between the build and the first read, as what is damaged later."""
    wanted, load = read_all(corpus().train), shards.load_or_build

    def damaged(*arguments):
        folder, manifest = load(*arguments)
        (folder / "train-00001.offsets").unlink()
        return folder, manifest

    monkeypatch.setattr(shards, "load_or_build", damaged)
    assert all(np.array_equal(values, wanted[key]) for key, values in read_all(corpus().train).items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda texts: (texts / "01.txt").write_text("something else\n"), "the documents have changed since the"),
        (
            lambda texts: (texts / "99.txt").write_text("one more\n"),
            "the documents have changed since the run began",
        ),
        (lambda texts: shutil.rmtree(texts), "data path '.*texts': no such file or folder"),
        (lambda texts: (texts / "zz.txt").write_bytes(b"\xff"), "zz.txt: not valid UTF-8 at byte 0"),
    ],
)
def test_a_shard_that_cannot_be_built_again_ends_the_run_with_status_1(corpus, store, tmp_path, texts, change, said):
    """2 would say that nothing was trained. Nothing is built of the other documents."""
    ready = corpus()
    batches = batches_of(ready.train)
    next(batches)
    (path,) = (tmp_path / "cache" / "shards").glob("*/train-00001.bin")
    change(texts)
    path.unlink()
    with pytest.raises(DataLost, match=f"train-00001.bin: is missing, and cannot be rebuilt: .*{said}") as caught:
        list(batches)
    assert caught.value.exit_status == 1 and "\n" not in str(caught.value)
    assert len([*(tmp_path / "cache" / "shards").glob("*/")]) == 1


def test_a_disk_without_room_to_build_a_shard_again_ends_the_run_with_status_1(corpus, store, tmp_path, monkeypatch):
    ready = corpus()
    (path,) = (tmp_path / "cache" / "shards").glob("*/train-00001.bin")
    path.unlink()

    def full(*unused):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("files.atomic.os.fsync", full)
    with pytest.raises(DataLost, match=r"is missing, and cannot be rebuilt: .*No space left on device"):
        read_all(ready.train)


def test_a_shard_that_is_not_as_long_as_its_record_says_is_mended_before_it_is_read(tmp_path):
    path, said = tmp_path / "train-00000.bin", []

    def mend(what):
        said.append(what)
        np.arange(11, dtype="<u2").tofile(path)

    np.arange(10, dtype="<u2").tofile(path)
    assert shards.ShardFile(path, "<u2", 10, pytest.fail)[3:99].tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert shards.ShardFile(path, "<u2", 11, mend)[9:].tolist() == [9, 10]
    assert said == [f"{path}: has 20 bytes, not 22"]
    with pytest.raises(DataLost, match=r"train-00000.bin: has 22 bytes, not 24"):
        shards.ShardFile(path, "<u2", 12, said.append)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux lists the open files there")
def test_no_file_is_kept_open_however_many_shards_there_are(corpus, store):
    read_all(corpus().train)
    opened = {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}
    assert not [path for path in opened if path.endswith((".bin", ".offsets"))]


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", 7])
def test_a_manifest_that_names_a_file_elsewhere_is_written_anew(corpus, tmp_path, name):
    corpus()
    (path,) = (tmp_path / "cache" / "shards").glob("*/manifest.json")
    manifest, lines = json.loads(path.read_text()), []
    changed = copy.deepcopy(manifest)
    changed["splits"]["train"][0]["name"] = name
    path.write_text(json.dumps(changed))
    corpus(announce=lines.append)
    assert json.loads(path.read_text()) == manifest and len(lines) == 1 and lines[0].startswith("tokenized")


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["splits"]["train"].append(manifest["splits"]["train"][0]),
        lambda manifest: manifest["splits"]["train"].reverse(),
        lambda manifest: manifest["splits"]["train"].pop(),
        lambda manifest: manifest["splits"]["train"][0].update(bytes=1),
        lambda manifest: manifest["splits"].update(other=[]),
        lambda manifest: manifest.update(splits=[]),
        lambda manifest: manifest.pop("token"),
    ],
)
def test_a_manifest_that_is_not_that_of_the_documents_is_written_anew(corpus, store, tmp_path, change):
    """Any damage counts: a shard that is named twice would be trained on twice."""
    wanted = read_all(corpus().train)
    (path,) = (tmp_path / "cache" / "shards").glob("*/manifest.json")
    manifest = json.loads(path.read_text())
    changed = copy.deepcopy(manifest)
    change(changed)
    path.write_text(json.dumps(changed))
    assert all(np.array_equal(values, wanted[key]) for key, values in read_all(corpus().train).items())
    assert json.loads(path.read_text()) == manifest


def test_a_record_of_a_shard_that_names_another_file_is_written_anew(corpus, store, tmp_path):
    corpus()
    (path,) = (tmp_path / "cache" / "shards").glob("*/train-00001.json")
    shard = json.loads(path.read_text())
    path.write_text(json.dumps(shard | {"name": "../../secret"}))
    corpus()
    assert json.loads(path.read_text()) == shard


def test_a_killed_build_goes_on_with_the_next_shard(store, tmp_path, texts):
    process = start(texts, tmp_path / "cache", stop_after=4)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    finished = store("*.json")
    assert len(finished) == 4 and "manifest.json" not in finished
    outputs = [start(texts, tmp_path / cache, -1).communicate()[0] for cache in ("cache", "other")]
    assert outputs[0].split()[-1] == outputs[1].split()[-1]
    assert not [output for output in outputs if "rebuilding" in output]
    after = store()
    assert len(after) > 20 and not [name for name in after if name.endswith(".part")]
    assert {name: after[name] for name in finished} == finished


def test_of_two_processes_one_builds(tmp_path, texts):
    both = [start(texts, tmp_path / "cache", -1) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert outputs[0].split()[-1] == outputs[1].split()[-1]
    assert "".join(outputs).count("training a SentencePiece tokenizer") == 1
    assert "".join(outputs).count("tokenized 39 documents") == 1


def test_text_that_is_not_utf8_stops_the_build(corpus, texts):
    (texts / "zz.bin").write_bytes(b"\x89PNG\xff")
    with pytest.raises(DataError, match=r"zz.bin: not valid UTF-8 at byte 0 \(line 1\). .*data.bad_documents=skip"):
        corpus()
    (texts / "zz.bin").unlink()
    corpus()


def test_shards_of_another_tokenizer_are_an_error(corpus, tmp_path):
    corpus()
    (manifest,) = (tmp_path / "cache" / "shards").glob("*/manifest.json")
    manifest.write_text(manifest.read_text().replace('"tokenizer": "byte"', '"tokenizer": "0123"'))
    message = r"manifest.json: these shards were made with another tokenizer than this run's \(0123, not byte\); remove"
    with pytest.raises(DataError, match=message):
        corpus()


def test_a_wide_vocabulary_takes_wider_files(corpus, store, tmp_path, monkeypatch):
    monkeypatch.setattr("input_pipeline.tokenization.ByteTokenizer.vocab_size", 1 << 17)
    wide = corpus(vocab_size=1 << 17)
    (path,) = (tmp_path / "cache" / "shards").glob("*/manifest.json")
    assert json.loads(path.read_text())["token"] == "<u4"
    assert sum(path.stat().st_size for path in path.parent.glob("train-*.bin")) == 4 * wide.train.num_tokens
    assert read_all(wide.train)["targets"].max() < 256


def test_progress_is_a_line_now_and_then(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.progress("tokenizing", 10_000_000, lines.append) as advance:
        for _ in range(10):
            now[0] += 2.0
            advance(1_000_000)
    assert lines == [
        "tokenizing: 30% of 10.0 MB, 0.5 MB/s, 14 s left",
        "tokenizing: 60% of 10.0 MB, 0.5 MB/s, 8 s left",
        "tokenizing: 90% of 10.0 MB, 0.5 MB/s, 2 s left",
    ]
    lines.clear()
    with progress.progress("reading documents", None, lines.append) as advance:
        now[0] += 10.0
        advance(40_000_000)
    assert lines == ["reading documents: 40.0 MB, 4.0 MB/s"]
    lines.clear()
    with progress.progress("copying", 10_000_000, lines.append) as advance:
        now[0] += 10.0
        advance(0)  # an empty file comes first, from which no time that is left follows
    assert not lines
