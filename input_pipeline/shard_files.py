# SPDX-License-Identifier: Apache-2.0
"""The files of a shard: their record, the check that they match it, and an array view for a run."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic

from files.json_reader import Count, JsonError, Object, read_json
from input_pipeline.errors import DataLost


class Record(Object):
    """The content of a shard's NAME.json."""

    name: Annotated[str, pydantic.Field(pattern="^(train|heldout)-[0-9]{5,}$")]
    documents: Count
    bytes: Count  # of text
    tokens: Count
    digest: str


class Manifest(Object):
    """The content of manifest.json, in addition to the facts that determine the folder's name."""

    documents: str  # digest of the documents
    end_of_document: Count
    token: Literal["<u2", "<u4"]
    splits: dict[str, list[Record]]


class ShardFile:
    """The numbers in a file of a shard; a slice of it is an array, as with a numpy array.

    Every read opens the file and compares it with its first state. A memory map would end the process if the file is
    truncated and give other tokens if it is overwritten, and hundreds of shards are too many to keep open.

    If the file changed, is missing, or does not have `length` numbers, `rebuild` is called with a description. It
    returns once the shard is restored. Raises DataLost if the shard cannot be restored.
    """

    def __init__(self, path: Path, dtype: str, length: int, rebuild: Callable[[str], None]):
        self._path, self._dtype, self._length, self._rebuild = str(path), np.dtype(dtype), length, rebuild
        self._first: os.stat_result | None = None  # the file's status when it was known to be valid
        self[0:0]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: slice) -> np.ndarray:
        start, stop, _ = places.indices(self._length)
        offset, size = start * self._dtype.itemsize, (stop - start) * self._dtype.itemsize
        try:
            content = self._checked(offset, size)
        except DataLost as damage:
            self._rebuild(str(damage))
            self._first = None
            content = self._checked(offset, size)
        return np.frombuffer(content, self._dtype)

    def _checked(self, offset: int, size: int) -> bytes:
        """Return some bytes of the file; DataLost if the file changed."""
        content, now = self._read(offset, size)
        if self._first is None and now.st_size != self._length * self._dtype.itemsize:
            raise self._damaged(f"has {now.st_size:,} bytes, not {self._length * self._dtype.itemsize:,}")
        change = change_of(self._first, now) if self._first else ""
        if change or len(content) != size:
            raise self._damaged(f"{change or 'cannot be read to its end'} since this run opened it")
        self._first = self._first or now
        return content

    def _read(self, offset: int, size: int) -> tuple[bytes, os.stat_result]:
        """Return some bytes of the file and its status after the read."""
        try:
            with open(self._path, "rb", buffering=0) as file:
                file.seek(offset)
                return file.read(size), os.fstat(file.fileno())
        except FileNotFoundError as error:
            raise self._damaged("is missing") from error
        except OSError as error:
            raise self._damaged(f"cannot be read: {error.strerror}") from error

    def _damaged(self, what: str) -> DataLost:
        return DataLost(f"{self._path}: {what}")


def change_of(first: os.stat_result, now: os.stat_result) -> str:
    """Return how a file changed; '' if it did not."""
    if first.st_ino != now.st_ino:
        return "was replaced"
    if first.st_size != now.st_size:
        return f"changed its size from {first.st_size:,} to {now.st_size:,} bytes"
    return "was written to" if first.st_mtime_ns != now.st_mtime_ns else ""


def damage(folder: Path, shard: Record, token: str) -> str:
    """Return which file of a shard differs from the shard's record, and how; '' if all match."""
    sizes = {"bin": shard["tokens"] * np.dtype(token).itemsize, "offsets": shard["documents"] * 8}
    try:
        for suffix, size in sizes.items():
            path = folder / f"{shard['name']}.{suffix}"
            if path.stat().st_size != size:
                return f"{path}: has {path.stat().st_size:,} bytes, not {size:,}"
        same = shard["digest"] == digest_of(folder, shard["name"])
    except FileNotFoundError as error:
        return f"{error.filename}: is missing"
    except OSError as error:
        return f"{error.filename or folder / shard['name']}: {error.strerror}"
    return "" if same else f"{folder / shard['name']}.bin, .offsets: their content does not match their digest"


def digest_of(folder: Path, name: str) -> str:
    """Return the digest of the numbers of a shard."""
    digest = hashlib.blake2b(digest_size=16)
    for path in (folder / f"{name}.bin", folder / f"{name}.offsets"):
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def read_record(folder: Path, name: str) -> Record | None:
    """Return the record of a shard; None if it is missing, incomplete or of another shard."""
    record = _read(folder / f"{name}.json", Record)
    return record if record and record["name"] == name else None


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder; None if it is missing or invalid."""
    return _read(folder / "manifest.json", Manifest)


def _read(path: Path, schema):
    try:
        return read_json(path, schema)
    except (OSError, JsonError):
        return None
