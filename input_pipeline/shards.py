# SPDX-License-Identifier: Apache-2.0
"""Tokenized documents on disk: memory-mapped shards with a manifest, built once, read as windows.

A folder holds the shards of one corpus under one tokenizer; its name is the hash of both. Shard k of
`train` or `heldout` is three files: NAME-k.bin (the tokens, each document followed by end of document),
NAME-k.offsets (int64, where documents start in it) and, when those are complete, NAME-k.json (counts and
digest). manifest.json comes last. A build that was interrupted goes on with the first shard that is not
complete, and a shard that is not what its digest says is built again.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np

from input_pipeline.cache import locked, writing
from input_pipeline.documents import PIECE_BYTES, Span, check_unchanged, gzip_bits_per_byte
from input_pipeline.errors import DataError
from input_pipeline.packing import pack
from input_pipeline.progress import progress

FORMAT = 1  # of the files; another number is another folder
SHARD_BYTES = 4 << 20  # of text in a shard, or a 64th of the corpus
BATCH_CHARACTERS = 4 << 20  # encoded at once, in parallel


class TokenWindows:
    """The stored tokens as windows of any length; a window source.

    Attributes:
        num_documents, num_tokens (ends of documents among them), num_bytes (of UTF-8 text).
    """

    def __init__(self, shards: list[np.ndarray], starts: np.ndarray, num_bytes: int, end_of_document: int):
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

    def _copy(self, begin: int, row: np.ndarray) -> None:
        """Fill a row with the stored tokens from `begin` on, across shards; place -1 is end of document."""
        done = 0
        if begin < 0:
            row[0], begin, done = self._end_of_document, 0, 1
        number = int(np.searchsorted(self._firsts, begin, side="right")) - 1
        while done < len(row) and number < len(self._shards):
            part = self._shards[number][begin - self._firsts[number] :][: len(row) - done]
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


def open_windows(stores: list[tuple[Path, dict]], split: str) -> TokenWindows:
    """Open a split of some (folder, manifest), end to end, as memory-mapped windows.

    They have one tokenizer. Nothing is read but the starts of the documents.
    """
    shards = [(folder, shard) for folder, manifest in stores for shard in manifest["splits"][split]]
    token, end_of_document = np.dtype(stores[0][1]["token"]), stores[0][1]["end_of_document"]
    arrays = [np.asarray(np.memmap(folder / f"{shard['name']}.bin", token, "r")) for folder, shard in shards]
    firsts = [0, *accumulate(shard["tokens"] for _, shard in shards)]
    starts = [np.fromfile(folder / f"{shard['name']}.offsets", "<i8") for folder, shard in shards]
    starts = np.concatenate([first + part for first, part in zip(firsts, starts, strict=False)])
    return TokenWindows(arrays, starts, sum(shard["bytes"] for _, shard in shards), end_of_document)


def _build(folder: Path, splits: dict[str, list[Span]], tokenizer, facts: dict, announce) -> dict:
    folder.mkdir(parents=True, exist_ok=True)
    token = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    units = {f"{split}-{k:05d}": unit for split in splits for k, unit in enumerate(_units(splits[split]))}
    shards = {name: _complete_shard(folder, name) for name in units}
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
    _write_json(folder / "manifest.json", manifest)
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
    _write_json(folder / f"{name}.json", shard)
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
        texts = span.text()
        text, begins = next(texts), span.begins
        for following in texts:
            yield text, begins, False
            text, begins = following, False
        yield text, begins, span.ends


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
    """Return the manifest if it is there and every shard is what it says. Raises DataError where it has other facts."""
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
    return manifest if all(_complete_shard(folder, shard["name"]) == shard for shard in shards) else None


def _complete_shard(folder: Path, name: str) -> dict | None:
    """Return what NAME.json says of a shard if it is there and its files are what it says."""
    shard = _read_json(folder / f"{name}.json")
    return shard if shard and shard["digest"] == _shard_digest(folder, name) else None


def _shard_digest(folder: Path, name: str) -> str | None:
    digest = hashlib.blake2b(digest_size=16)
    for path in (folder / f"{name}.bin", folder / f"{name}.offsets"):
        if not path.exists():
            return None
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def _read_json(path: Path) -> dict | None:
    """Return what is in the file; None where it is missing or was torn."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _write_json(path: Path, value: dict) -> None:
    with writing(path) as file:
        file.write(json.dumps(value, indent=1).encode())
