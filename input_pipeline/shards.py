# SPDX-License-Identifier: Apache-2.0
"""Tokenized documents on disk: shards with a manifest, built once, read as windows.

A folder holds the shards of one corpus under one tokenizer; its name is the hash of both. Shard k of
`train` or `heldout` is three files: NAME-k.bin (the tokens, each document followed by end of document),
NAME-k.offsets (int64, where documents start in it) and, when those are complete, NAME-k.json (counts and
digest). manifest.json comes last. A build that was interrupted goes on with the first shard that is not
complete, and a shard that is not what its digest says is built again. One that changes under a run ends it.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from itertools import accumulate, chain, pairwise
from pathlib import Path

import numpy as np

from input_pipeline.cache import locked, write_json, writing
from input_pipeline.documents import PIECE_BYTES, Span, check_unchanged, gzip_bits_per_byte
from input_pipeline.errors import DataError
from input_pipeline.packing import Piece, pack, pieces
from input_pipeline.progress import progress
from input_pipeline.windows import Windows

FORMAT = 1  # of the files; another number is another folder
SHARD_BYTES = 4 << 20  # of text in a shard, or a 64th of the corpus
BATCH_CHARACTERS = 4 << 20  # encoded at once, in parallel


class ShardFile:
    """The numbers in a file of a shard, of which a slice is an array, as of a numpy array.

    Every read opens the file and compares it with what it was at first: of a memory map that is cut off under it a
    process dies, one that is overwritten gives other tokens, and hundreds of shards are too many to keep open.

    Raises:
        DataError: the file is not of this length, and when read: it changed, was replaced or is gone.
    """

    def __init__(self, path: Path, dtype: str, length: int):
        """Take a file of `length` numbers of a numpy dtype."""
        self._path, self._dtype, self._length = str(path), np.dtype(dtype), length
        _, self._first = self._read(0, 0)
        if self._first.st_size != length * self._dtype.itemsize:
            raise self._damaged(f"has {self._first.st_size:,} bytes, not {length * self._dtype.itemsize:,}")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: slice) -> np.ndarray:
        start, stop, _ = places.indices(self._length)
        size = (stop - start) * self._dtype.itemsize
        content, now = self._read(start * self._dtype.itemsize, size)
        change = _change(self._first, now)
        if change or len(content) != size:
            raise self._damaged(f"{change or 'cannot be read to its end'} since this run opened it")
        return np.frombuffer(content, self._dtype)

    def _read(self, offset: int, size: int) -> tuple[bytes, os.stat_result]:
        """Return some bytes of the file, and then what it is."""
        try:
            with open(self._path, "rb", buffering=0) as file:
                file.seek(offset)
                return file.read(size), os.fstat(file.fileno())
        except FileNotFoundError as error:
            raise self._damaged("is gone") from error
        except OSError as error:
            raise self._damaged(f"cannot be read: {error.strerror}") from error

    def _damaged(self, what: str) -> DataError:
        advice = "start the run again, which builds what is damaged again from its documents"
        return DataError(f"{self._path}: {what}; {advice}")


def _change(first: os.stat_result, now: os.stat_result) -> str:
    """Return what was done to a file; '' where nothing was."""
    if first.st_ino != now.st_ino:
        return "was replaced"
    if first.st_size != now.st_size:
        return f"was {first.st_size:,} bytes long and has {now.st_size:,}"
    return "was written to" if first.st_mtime_ns != now.st_mtime_ns else ""


class TokenWindows(Windows):
    """The stored tokens as windows of any length; a window source.

    Attributes:
        num_documents, num_tokens (ends of documents among them), num_bytes (of UTF-8 text).
    """

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
        """Return what of which documents is in a window, as `packing.pieces`."""
        return pieces(index * sequence_length, sequence_length, self._starts, self.num_tokens)

    def _copy(self, begin: int, row: np.ndarray) -> None:
        """Fill a row with the stored tokens from `begin` on, across shards; place -1 is end of document."""
        done = 0
        if begin < 0:
            row[0], begin, done = self._end_of_document, 0, 1
        number = int(np.searchsorted(self._firsts, begin, side="right")) - 1
        while done < len(row) and number < len(self._shards):
            place = begin - self._firsts[number]
            part = self._shards[number][place : place + len(row) - done]
            row[done : done + len(part)] = part
            begin, done, number = begin + len(part), done + len(part), number + 1


def load_or_build(
    folder: Path, splits: dict[str, list[Span]], tokenizer, facts: dict, announce: Callable[[str], object]
) -> dict:
    """Return the manifest of the shards in `folder`, building what is missing or damaged.

    Args:
        splits: the documents of "train", of "heldout", or of both.
        facts: what the folder's name is the hash of, kept in the manifest.

    Raises:
        DataError: a document cannot be read or changed meanwhile, or the folder holds something else.
    """
    manifest = _complete_manifest(folder, facts)
    if manifest:
        return manifest
    with locked(folder.with_suffix(".lock"), announce):
        return _complete_manifest(folder, facts) or _build(folder, splits, tokenizer, facts, announce)


def open_windows(stores: list[tuple[Path, dict]], split: str, kind: type[TokenWindows] = TokenWindows) -> TokenWindows:
    """Open a split of some (folder, manifest), end to end, as windows of a kind.

    They have one tokenizer. Nothing is read but the starts of the documents.
    """
    shards = [(folder, shard) for folder, manifest in stores for shard in manifest["splits"][split]]
    token, end_of_document = stores[0][1]["token"], stores[0][1]["end_of_document"]
    arrays = [ShardFile(folder / f"{shard['name']}.bin", token, shard["tokens"]) for folder, shard in shards]
    firsts = [0, *accumulate(shard["tokens"] for _, shard in shards)]
    starts = [ShardFile(folder / f"{shard['name']}.offsets", "<i8", shard["documents"])[:] for folder, shard in shards]
    starts = np.concatenate([first + part for first, part in zip(firsts, starts, strict=False)])
    return kind(arrays, starts, sum(shard["bytes"] for _, shard in shards), end_of_document)


def _build(folder: Path, splits: dict[str, list[Span]], tokenizer, facts: dict, announce) -> dict:
    folder.mkdir(parents=True, exist_ok=True)
    token = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    units = {f"{split}-{k:05d}": unit for split in splits for k, unit in enumerate(_units(splits[split]))}
    shards = {name: _complete_shard(folder, name, token, announce) for name in units}
    missing = {name: units[name] for name, shard in shards.items() if shard is None}
    total_bytes = sum(span.size for unit in missing.values() for span in unit)
    with progress("tokenizing", total_bytes, announce) as advance:
        for name, unit in missing.items():
            shards[name] = _write_shard(folder, name, unit, tokenizer, token, advance)
    spans = [span for split in splits.values() for span in split]
    check_unchanged(spans)
    manifest = {
        **facts,
        "token": token,
        "gzip_bits_per_byte": gzip_bits_per_byte(splits["heldout"]) if "heldout" in splits else None,
        "splits": {split: [shards[name] for name in units if name.startswith(split)] for split in splits},
    }
    write_json(folder / "manifest.json", manifest)
    announce(
        f"tokenized {len({id(span.document) for span in spans}):,} documents, "
        f"{sum(span.size for span in spans) / 1e6:,.1f} MB, "
        f"into {sum(shard['tokens'] for shard in shards.values()):,} tokens: {folder}"
    )
    return manifest


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


def _write_shard(folder: Path, name: str, unit: list[Span], tokenizer, token: str, advance) -> dict:
    starts, num_tokens = [], 0
    with writing(folder / f"{name}.bin") as file:
        for tokens, begins in _encoded(unit, tokenizer, advance):
            starts += [num_tokens] if begins else []
            num_tokens += len(tokens)
            file.write(tokens.astype(token).tobytes())
    with writing(folder / f"{name}.offsets") as file:
        file.write(np.array(starts, "<i8").tobytes())
    shard = {
        "name": name,
        "documents": len(starts),
        "bytes": sum(span.size for span in unit),
        "tokens": num_tokens,
        "digest": _shard_digest(folder, name),
    }
    write_json(folder / f"{name}.json", shard)
    return shard


def _encoded(unit: list[Span], tokenizer, advance) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield (tokens of a piece, with the end of document where it ends one; whether a document begins with it)."""
    for batch in _batches(_pieces(unit)):
        arrays = tokenizer.encode_batch([text for text, _, _ in batch])
        for tokens, (_, begins, ends) in zip(arrays, batch, strict=True):
            yield np.append(tokens, tokenizer.end_of_document) if ends else tokens, begins
        advance(sum(len(text.encode()) for text, _, _ in batch))


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


def _complete_manifest(folder: Path, facts: dict) -> dict | None:
    """Return the manifest if it is there and every shard is what it says.

    Raises:
        DataError: it has other facts.
    """
    manifest = _read_json(folder / "manifest.json")
    if manifest is None:
        return None
    others = [key for key in facts if manifest.get(key) != facts[key]]
    if others:
        raise DataError(
            f"{folder}/manifest.json: these shards were made with another {others[0]} than this run's "
            f"({manifest.get(others[0])}, not {facts[others[0]]}); remove the folder to have it made again"
        )
    shards = [shard for split in manifest["splits"].values() for shard in split]
    whole = all(_complete_shard(folder, shard["name"], manifest["token"]) == shard for shard in shards)
    return manifest if whole else None


def _complete_shard(folder: Path, name: str, token: str, announce: Callable[[str], object] = str) -> dict | None:
    """Return what NAME.json says of a shard if it is there and its files are what it says; announce what is not."""
    shard = _read_json(folder / f"{name}.json")
    if shard is None or shard["name"] != name:
        return None
    if damage := _damage(folder, shard, token):
        announce(f"{damage}; it is built again")
        return None
    return shard


def _damage(folder: Path, shard: dict, token: str) -> str:
    """Return which file of a shard is not what the shard's record says, and how; '' where they are."""
    sizes = {"bin": shard["tokens"] * np.dtype(token).itemsize, "offsets": shard["documents"] * 8}
    for suffix, size in sizes.items():
        path = folder / f"{shard['name']}.{suffix}"
        if not path.exists():
            return f"{path}: is gone"
        if path.stat().st_size != size:
            return f"{path}: has {path.stat().st_size:,} bytes, not {size:,}"
    same = shard["digest"] == _shard_digest(folder, shard["name"])
    return "" if same else f"{folder / shard['name']}.bin, .offsets: not what their digest says"


def _shard_digest(folder: Path, name: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in (folder / f"{name}.bin", folder / f"{name}.offsets"):
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def _read_json(path: Path) -> dict | None:
    """Return what is in the file; None where it is missing or was torn."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
