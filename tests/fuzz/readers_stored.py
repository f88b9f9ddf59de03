# SPDX-License-Identifier: Apache-2.0
"""Readers to fuzz of what the input pipeline keeps itself: shards, ledger, the listing of copies."""

import functools
import pathlib
import shutil
import tempfile

import numpy as np

from input_pipeline import ledger, shards
from input_pipeline.corpus import Corpus, prepare
from input_pipeline.reading import remote
from tests.fuzz.data_section import section
from tests.fuzz.harness import reader

LENGTH, SHARD_BYTES = 16, 600
TEXTS = {f"{number}.txt": f"document {number}\n" * (10 + number) for number in range(12)}


@functools.cache
def _good() -> tuple[pathlib.Path, np.ndarray]:
    """Return a folder with texts and a cache that has their shards, and the tokens that they hold."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="fuzz"))
    (folder / "texts").mkdir()
    for name, text in TEXTS.items():
        (folder / "texts" / name).write_text(text)
    return folder, _tokens(_prepared(folder, folder / "texts"))


def _prepared(folder: pathlib.Path, texts: pathlib.Path) -> Corpus:
    """Prepare a corpus in small shards, with its cache in a folder."""
    usual, shards.SHARD_BYTES = shards.SHARD_BYTES, SHARD_BYTES
    try:
        data = section(folder, source="text", path=str(texts))
        return prepare(data, vocab_size=256, vocab_size_typed=False, announce=str)
    finally:
        shards.SHARD_BYTES = usual


def _tokens(corpus: Corpus) -> np.ndarray:
    parts = [part.read(np.arange(part.num_examples(LENGTH)), LENGTH) for part in (*corpus.train.parts, corpus.heldout)]
    return np.concatenate([batch["targets"].ravel() for batch in parts])


def _file(pattern: str) -> pathlib.Path:
    return sorted((_good()[0] / "cache" / "shards").glob(f"*/{pattern}"))[0]


def shard_reader(pattern: str) -> None:
    """Register a reader of a cache with one changed file: it gives the right tokens, or is refused."""

    @reader(f"shards: {pattern}", lambda: [_file(pattern).read_bytes()], divisor=2)
    def read(content: bytes, folder) -> None:
        good, wanted = _good()
        shutil.copytree(good / "cache", folder / "cache")
        (folder / _file(pattern).relative_to(good)).write_bytes(content)
        np.testing.assert_array_equal(_tokens(_prepared(folder, good / "texts")), wanted)


for changed in ("manifest.json", "train-00001.json", "train-00001.bin", "train-00001.offsets"):
    shard_reader(changed)


@functools.cache
def _corpus() -> Corpus:
    return _prepared(_good()[0], _good()[0] / "texts")


def _sections() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        for step in (0, 5, 9):
            section = ledger.new_section(
                _corpus(), step=step, examples=8 * step, global_batch=8, sequence_length=LENGTH, seed=step
            )
            ledger.append(pathlib.Path(folder), section | {"roll_backs": step // 9, "skips": [(4, 3)] * (step // 9)})
        return [pathlib.Path(folder, ledger.NAME).read_bytes()]


@reader("ledger", _sections)
def read_ledger(content: bytes, folder) -> None:
    (folder / ledger.NAME).write_bytes(content)
    assert ledger.roll_backs(folder) >= 0
    examples = ledger.explain(ledger.section_of(folder, 7, 20), 7, _corpus())
    assert len(ledger.table(examples)) > len(examples) >= 1


@functools.cache
def _listing() -> list[bytes]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="fuzz"))
    fetched = remote.fetch(f"file://{_good()[0]}/texts", folder, str)
    return [(pathlib.Path(fetched).parent / "listing.json").read_bytes()]


@reader("listing of copies", _listing, divisor=4)
def read_listing(content: bytes, folder) -> None:
    url = f"file://{_good()[0]}/texts"
    copies = pathlib.Path(remote.fetch(url, folder, str))
    (copies.parent / "listing.json").write_bytes(content)
    again = pathlib.Path(remote.fetch(url, folder, str))
    assert {path.name: path.read_text() for path in again.iterdir()} == TEXTS
    assert len([*(_good()[0] / "texts").iterdir()]) == len(TEXTS)
