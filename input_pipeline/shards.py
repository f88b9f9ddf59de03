# SPDX-License-Identifier: Apache-2.0
"""Stores tokenized documents on disk, as shards with a manifest that are built once and read as windows.

A folder holds the shards of one corpus under one tokenizer; its name is the hash of both. Shard k of
`train` or `heldout` is four files: NAME-k.bin (the tokens, each document followed by end of document),
NAME-k.offsets (int64, where documents start in it), NAME-k.text (digest of the text that was tokenized) and, when
those are complete, NAME-k.json (counts and digest). manifest.json is written last. An interrupted build resumes with
the first incomplete shard. A shard that does not match its digest is built again, even if it changes during a run.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path

import numpy as np

from files.atomic import writing
from input_pipeline.cache import digest_of_json, locked, write_json
from input_pipeline.errors import DataError, DataLost
from input_pipeline.packing import Piece, pack, pieces
from input_pipeline.progress import progress
from input_pipeline.reading.documents import PIECE_BYTES, Span, check_unchanged
from input_pipeline.shard_files import Manifest, Record, ShardFile, damage, digest_of, read_manifest, read_record
from input_pipeline.threads import in_threads
from input_pipeline.windows import Windows

FORMAT = 1  # version of the files; it is part of the folder's name
SHARD_BYTES = 4 << 20  # of text in a shard, or a 64th of the corpus
BATCH_CHARACTERS = 4 << 20  # encoded at once, in parallel

Announce = Callable[[str], object]
Splits = dict[str, list[Span]]  # of one source: its documents for "train", for "heldout"


class TokenWindows(Windows):
    """The stored tokens as windows of any length; a window source. `num_tokens` counts the ends of documents too."""

    def __init__(self, shards: list[np.ndarray | ShardFile], starts: np.ndarray, num_bytes: int, end_of_document: int):
        self._shards, self._starts, self._end_of_document = shards, starts, end_of_document
        self._firsts = np.array([0, *accumulate(len(shard) for shard in shards)])
        self.num_documents, self.num_tokens, self.num_bytes = len(starts), int(self._firsts[-1]), num_bytes

    def num_examples(self, sequence_length: int) -> int:
        return -(-self.num_tokens // sequence_length)

    def read(self, indices: np.ndarray, sequence_length: int) -> dict[str, np.ndarray]:
        """Return the windows `indices` as `packing.pack` gives them: int32 [len(indices), T] each."""
        begins = np.asarray(indices, np.int64) * sequence_length
        stream = np.zeros((len(begins), sequence_length + 1), np.int32)
        for row, begin in enumerate(begins.tolist()):
            self._copy(begin - 1, stream[row])
        return pack(stream, begins, self._starts, self.num_tokens)

    def pieces(self, index: int, sequence_length: int) -> list[Piece]:
        """Return the parts of documents in a window, as `packing.pieces` does."""
        return pieces(index * sequence_length, sequence_length, self._starts, self.num_tokens)

    def token_counts(self, most_tokens: int, vocab_size: int) -> np.ndarray:
        """Return how often each token occurs: int64 [vocab_size]. In a long store only a part of each shard counts."""
        share = -(-most_tokens // len(self._shards))
        return sum(np.bincount(shard[:share], minlength=vocab_size) for shard in self._shards)

    def _copy(self, begin: int, row: np.ndarray) -> None:
        """Fill a row with the stored tokens from `begin` on, across shards; position -1 is end of document."""
        done = 0
        if begin < 0:
            row[0], begin, done = self._end_of_document, 0, 1
        number = int(np.searchsorted(self._firsts, begin, side="right")) - 1
        while done < len(row) and number < len(self._shards):
            place = begin - self._firsts[number]
            part = self._shards[number][place : place + len(row) - done]
            row[done : done + len(part)] = part
            begin, done, number = begin + len(part), done + len(part), number + 1


class Store:
    """The complete shards of one source under one tokenizer; those that are damaged later are rebuilt.

    Attributes:
        folder, manifest: of the shards.
        announce: called with progress lines while shards are rebuilt.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, tokenizer, read_documents: Callable[[Announce], Splits],
        announce: Announce,
    ):  # fmt: skip
        """`read_documents` reads the current documents of "train", of "heldout", or of both."""
        self.folder, self.manifest, self.announce = folder, manifest, announce
        self._tokenizer, self._read_documents, self._rebuilding = tokenizer, read_documents, threading.Lock()
        self._lost: DataLost | None = None  # set once a shard could not be rebuilt

    def rebuild(self, shard: Record, what: str) -> None:
        """Rebuild a damaged shard and return when it matches its record; one thread of one process does the work.

        `what` is the damage that was found. Raises DataLost if a document changed or cannot be read.
        """
        with self._rebuilding:
            if self._lost:
                raise self._lost
            try:
                self._rebuild(shard, what)
            except (DataError, OSError) as error:
                self._lost = DataLost(f"{what}, and cannot be rebuilt: {error}")
                raise self._lost from error

    def _rebuild(self, shard: Record, what: str) -> None:
        with locked(self.folder.with_suffix(".lock"), self.announce):
            if damage(self.folder, shard, self.manifest["token"]):
                self.announce(f"{what}; rebuilding it from its documents")
                self._rebuild_all()

    def check(self, splits: Splits) -> dict:
        """Return the facts of documents; DataError if the shards were made of others."""
        facts = facts_of(splits, self._tokenizer)
        if facts["documents"] != self.manifest["documents"]:
            raise DataError("the documents have changed since the run began; restore them")
        return facts

    def _rebuild_all(self) -> None:
        splits = self._read_documents(self.announce)
        facts = self.check(splits)
        manifest = _build(self.folder, splits, self._tokenizer, facts, self.announce)
        if manifest["splits"] != self.manifest["splits"]:
            raise DataError("the same documents gave different tokens")


def facts_of(splits: Splits, tokenizer) -> dict:
    """Return the facts that determine the name of a folder of shards."""
    documents = hashlib.blake2b(digest_size=16)  # `digest` would hold the keys of all documents
    for split, spans in splits.items():
        documents.update(split.encode())
        for span in spans:
            documents.update(span.key)
    return {
        "format": FORMAT,
        "documents": documents.hexdigest(),
        "tokenizer": tokenizer.digest,
        "end_of_document": tokenizer.end_of_document,
    }


def load_or_build(cache: Path, splits: Splits, tokenizer, announce: Announce) -> tuple[Path, Manifest]:
    """Return the folder of the shards of some documents and its manifest, building what is missing or damaged.

    `splits` has the documents of "train", of "heldout", or of both. Raises DataError if one cannot be read or changed
    meanwhile, or if the folder holds something else.
    """
    facts = facts_of(splits, tokenizer)
    folder = cache / "shards" / digest_of_json(facts)
    manifest = _complete_manifest(folder, splits, facts)
    if manifest:
        return folder, manifest
    with locked(folder.with_suffix(".lock"), announce):
        return folder, (_complete_manifest(folder, splits, facts) or _build(folder, splits, tokenizer, facts, announce))


def load(folder: Path, manifest_digest: str) -> Manifest | None:
    """Return a manifest by its digest, once all its shards are found undamaged; else None."""
    manifest = read_manifest(folder)
    if digest_of_json(manifest) != manifest_digest:
        return None
    shards = [shard for split in manifest["splits"].values() for shard in split]
    damaged = any(in_threads(lambda shard: damage(folder, shard, manifest["token"]), shards))
    return None if damaged else manifest


def open_windows(stores: list[Store], split: str, kind: type[TokenWindows]) -> TokenWindows:
    """Open a split of some stores, end to end, as windows of a kind.

    All stores have the same tokenizer. Only the starts of the documents are read.
    """
    shards = [(store, shard) for store in stores for shard in store.manifest["splits"][split]]
    manifest = stores[0].manifest

    def opened(suffix: str, dtype: str, count: str) -> list[ShardFile]:
        return [
            ShardFile(store.folder / f"{shard['name']}.{suffix}", dtype, shard[count], partial(store.rebuild, shard))
            for store, shard in shards
        ]

    arrays = opened("bin", manifest["token"], "tokens")
    firsts = [0, *accumulate(shard["tokens"] for _, shard in shards)]
    starts = [file[:] for file in opened("offsets", "<i8", "documents")]
    starts = np.concatenate([first + part for first, part in zip(firsts, starts, strict=False)])
    return kind(arrays, starts, sum(shard["bytes"] for _, shard in shards), manifest["end_of_document"])


def _build(folder: Path, splits: Splits, tokenizer, facts: dict, announce: Announce) -> Manifest:
    folder.mkdir(parents=True, exist_ok=True)
    token = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    units = _named_units(splits)
    earlier = read_manifest(folder)
    checked = [shard for shards in earlier["splits"].values() for shard in shards] if earlier else []
    shards = {name: _complete_shard(folder, name, unit, token, announce) for name, unit in units.items()}
    for name, shard in shards.items():  # an interrupted build may have read documents that changed meanwhile
        if shard and shard not in checked and not _is_of(folder, name, units[name]):
            announce(f"{folder / name}.bin: not known to be of this text; building it again")
            shards[name] = None
    missing = {name: units[name] for name, shard in shards.items() if shard is None}
    total_bytes = sum(span.size for unit in missing.values() for span in unit)
    with progress("tokenizing", total_bytes, announce) as advance:
        for name, unit in missing.items():
            shards[name] = _write_shard(folder, name, unit, tokenizer, token, advance)
    spans = [span for split in splits.values() for span in split]
    check_unchanged(spans, announce)
    manifest = {
        **facts,
        "token": token,
        "splits": {split: [shards[name] for name in units if name.startswith(split)] for split in splits},
    }
    write_json(folder / "manifest.json", manifest)
    announce(
        f"tokenized {len({id(span.document) for span in spans}):,} documents, "
        f"{sum(span.size for span in spans) / 1e6:,.1f} MB, "
        f"into {sum(shard['tokens'] for shard in shards.values()):,} tokens: {folder}"
    )
    return manifest


def _named_units(splits: Splits) -> dict[str, list[Span]]:
    """Return {name of a shard: its documents}."""
    return {f"{split}-{k:05d}": unit for split in splits for k, unit in enumerate(_units(splits[split]))}


def _units(spans: list[Span]) -> Iterator[list[Span]]:
    """Yield the documents of each shard; one that is longer than two shards is cut at line starts."""
    shard_bytes = max(SHARD_BYTES, sum(span.size for span in spans) // 64)
    unit, room = [], shard_bytes
    for span in spans:
        while span.size > 2 * shard_bytes:
            head, span = span.cut(span.start + shard_bytes, slack=PIECE_BYTES)
            yield [*unit, head]
            unit, room = [], shard_bytes
        unit.append(span)
        room -= span.size
        if room <= 0:
            yield unit
            unit, room = [], shard_bytes
    if unit:
        yield unit


def _write_shard(folder: Path, name: str, unit: list[Span], tokenizer, token: str, advance) -> Record:
    starts, num_tokens, text = [], 0, hashlib.blake2b(digest_size=16)

    def read(content: bytes) -> None:
        text.update(content)
        advance(len(content))

    with writing(folder / f"{name}.bin") as file:
        for tokens, begins in _encoded(unit, tokenizer, read):
            starts += [num_tokens] if begins else []
            num_tokens += len(tokens)
            file.write(tokens.astype(token).tobytes())
    with writing(folder / f"{name}.offsets") as file:
        file.write(np.array(starts, "<i8").tobytes())
    with writing(folder / f"{name}.text") as file:
        file.write(text.hexdigest().encode())
    shard = {
        "name": name,
        "documents": len(starts),
        "bytes": sum(span.size for span in unit),
        "tokens": num_tokens,
        "digest": digest_of(folder, name),
    }
    write_json(folder / f"{name}.json", shard)
    return shard


def _encoded(unit: list[Span], tokenizer, read: Callable[[bytes], None]) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield (tokens of a piece, with end of document if it ends one; whether a document begins with it).

    `read` is called with the text of the pieces, in order.
    """
    for batch in _batches(_pieces(unit)):
        arrays = tokenizer.encode_batch([text for text, _, _ in batch])
        for tokens, (_, begins, ends) in zip(arrays, batch, strict=True):
            yield np.append(tokens, tokenizer.end_of_document) if ends else tokens, begins
        read("".join(text for text, _, _ in batch).encode())


def _pieces(unit: list[Span]) -> Iterator[tuple[str, bool, bool]]:
    """Yield (text, whether a document begins with it, whether one ends with it)."""
    for span in unit:
        for nth, (text, following) in enumerate(pairwise(chain(span.text(), [None]))):
            yield text, span.begins and not nth, span.ends and following is None


def _batches(pieces: Iterator[tuple[str, bool, bool]]) -> Iterator[list[tuple[str, bool, bool]]]:
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _complete_manifest(folder: Path, splits: Splits, facts: dict) -> Manifest | None:
    """Return the manifest if it exists and every shard matches it; DataError if it has other facts."""
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    others = [key for key in facts if manifest.get(key) != facts[key]]
    if others:
        made_with = str(manifest.get(others[0])).encode("unicode_escape").decode()[:40]
        raise DataError(
            f"{folder}/manifest.json: these shards were made with another {others[0]} than this run's "
            f"({made_with}, not {facts[others[0]]}); remove the folder, and it is built again"
        )
    units, token = _named_units(splits), manifest["token"]
    shards = [shard for split in manifest["splits"].values() for shard in split]
    whole = manifest["splits"].keys() == splits.keys() and [shard["name"] for shard in shards] == [*units]
    whole = whole and all(
        _complete_shard(folder, shard["name"], units[shard["name"]], token) == shard for shard in shards
    )
    return manifest if whole else None


def _is_of(folder: Path, name: str, unit: list[Span]) -> bool:
    """Return whether a shard was made of the present text of its documents, by its digest of that text."""
    try:
        known = (folder / f"{name}.text").read_text()
    except (OSError, UnicodeDecodeError):
        return False
    text = hashlib.blake2b(digest_size=16)
    for span in unit:
        for block in span.blocks():
            text.update(block)
    return known == text.hexdigest()


def _complete_shard(folder: Path, name: str, unit: list[Span], token: str, announce: Announce = str) -> Record | None:
    """Return the record of a shard if it is of these documents and matches its files; announce a damaged one."""
    shard = read_record(folder, name)
    if shard is None or shard["bytes"] != sum(span.size for span in unit):
        return None
    if said := damage(folder, shard, token):
        announce(f"{said}; rebuilding it")
        return None
    return shard
