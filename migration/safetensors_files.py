# SPDX-License-Identifier: Apache-2.0
"""Reads and writes folders of safetensors files a few rows at a time, so that no whole tensor is in memory.

A file has the length of a JSON header (8 bytes, little-endian), the header, and the tensors one after the other; see
github.com/huggingface/safetensors. The format's own reader checks each file before it is read here. A folder with
several files has an index, which names the file of each tensor.
"""

import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

from configs.errors import shown
from files.atomic import opened
from files.json_reader import JsonError, Object, read_json

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # limit for the tensors of a file, unless one alone is larger
METADATA = "__metadata__"  # a key of a header that is not a tensor
NAME_CHARACTERS = 255  # of a file
INDEX_BYTES = 100_000_000  # the format's limit for a header


class WeightsError(ValueError):
    """Files of weights do not fit; the message names the file and the tensor."""

    exit_status = 2


class Index(Object):
    """The index: the file of each tensor."""

    weight_map: dict[str, str]


class Stored(NamedTuple):
    """The location of a tensor: the file, the first byte, a key of DTYPES and the shape."""

    file: pathlib.Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    def rows(self, first: int, last: int) -> np.ndarray:
        """Return rows `first` to `last` of the first dimension, in the type of the file.

        It does not use the format's reader, which maps files: mapped pages would count as memory of this process, and a
        truncated file would end the process.
        """
        dtype, width = DTYPES[self.dtype], math.prod(self.shape[1:])
        size = (last - first) * width
        found = np.fromfile(self.file, dtype, size, offset=self.start + first * width * dtype.itemsize)
        if found.size != size:
            raise WeightsError(f"{self.file}: truncated; copy it again")
        return found.reshape(last - first, *self.shape[1:])


def find(folder: pathlib.Path) -> dict[str, Stored]:
    """Return {name: location} of all tensors of a folder; only headers are read.

    Raises:
      WeightsError: there is no such file, a file is not safetensors, or the index and the files disagree.
    """
    index = folder / INDEX
    if not index.is_file():
        return _tensors(folder / ONE_FILE)
    where = _files_by_index(index)
    headers = {file: _tensors(folder / file) for file in sorted(set(where.values()))}
    for name, file in where.items():
        if name not in headers[file]:
            raise WeightsError(f"{folder / file} lacks {shown(name)}, which {INDEX} lists for it")
    unlisted = {name: file for file, header in headers.items() for name in header if where.get(name) != file}
    if unlisted:
        name, file = min(unlisted.items())
        raise WeightsError(f"{folder / file} has {shown(name)}, which {INDEX} does not list for it")
    return {name: headers[file][name] for name, file in where.items()}


def check_names(given: Iterable[str], expected: Iterable[str], where, hint: str) -> None:
    """Raise WeightsError for the first missing tensor, or the first that the model does not have."""
    missing, unknown = sorted(set(expected) - set(given)), sorted(set(given) - set(expected))
    differences = []
    for names, verb, rest in ((missing, "lacks", ""), (unknown, "has", ", for which the model has no place")):
        more = f" and {len(names) - 1} more" if names[1:] else ""
        differences += [f"{verb} {shown(names[0])}{more}{rest}"] if names else []
    if differences:
        raise WeightsError(f"{where}: {' and '.join(differences)}; {hint}")


def write(
    folder: pathlib.Path, tensors: dict[str, tuple[str, tuple]], blocks: Callable[[str], Iterator[np.ndarray]]
) -> None:
    """Write tensors to a folder, in this order, in as many files as their size needs.

    Args:
      tensors: {name: (key of DTYPES, shape)}.
      blocks: name -> iterator of the tensor's rows, some at a time, in any float type.
    """
    shards = _shards(tensors)
    files = [ONE_FILE] if len(shards) == 1 else [
        f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)
    ]  # fmt: skip
    for file, names in zip(files, shards, strict=True):
        write_file(folder / file, {name: tensors[name] for name in names}, blocks)
    if len(files) > 1:
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        total = sum(_size(*tensor) for tensor in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
        (folder / INDEX).write_text(text + "\n")


def write_file(
    path: pathlib.Path, tensors: dict[str, tuple[str, tuple]], blocks: Callable[[str], Iterator[np.ndarray]]
) -> None:
    """Write tensors to one file, as `write` does to a folder."""
    header, end = {METADATA: {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + _size(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    with opened(path, path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (dtype, _) in tensors.items():
            for rows in blocks(name):
                file.write(np.ascontiguousarray(rows, DTYPES[dtype]).reshape(-1).view(np.uint8))


def _shards(tensors: dict) -> list[list[str]]:
    shards, room = [[]], SHARD_BYTES
    for name, tensor in tensors.items():
        size = _size(*tensor)
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def _size(dtype: str, shape: tuple) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize


def _files_by_index(index: pathlib.Path) -> dict[str, str]:
    """Return {tensor: name of its file}."""
    try:
        where = read_json(index, Index, max_bytes=INDEX_BYTES)["weight_map"]
        why = next((f"{shown(file)!r} is not a file name" for file in where.values() if not _is_name(file)), "")
    except JsonError as error:
        why = str(error).removeprefix(f"{index}: ")
    if why:
        raise WeightsError(f"{index} has no weight_map from tensors to files of its folder ({why})")
    return where


def _is_name(text: str) -> bool:
    """Return whether a text is a plain name of a file in the same folder."""
    return pathlib.Path(text).name == text and text.isprintable() and len(text) <= NAME_CHARACTERS


def _tensors(path: pathlib.Path) -> dict[str, Stored]:
    """Return {name: location} of the tensors of one file, after the format's own reader has accepted it."""
    _check(path)

    def named_once(pairs: list[tuple]) -> dict:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):  # the format forbids duplicates, but its reader accepts them
            twice = next(name for number, name in enumerate(names) if name in names[:number])
            raise WeightsError(f"{path}: its header has {shown(twice)} twice; download it again")
        return dict(pairs)

    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")), object_pairs_hook=named_once)
        begin = file.tell()
    header.pop(METADATA, None)
    check_types(path, {name: facts["dtype"] for name, facts in header.items()})
    return {
        name: Stored(path, begin + facts["data_offsets"][0], facts["dtype"], tuple(facts["shape"]))
        for name, facts in header.items()
    }


def check_types(path: pathlib.Path, types: dict[str, str]) -> None:
    """Raise WeightsError for the first tensor whose type is not one of DTYPES; `types` by name."""
    for name, kind in types.items():
        if kind not in DTYPES:
            raise WeightsError(f"{path}: {shown(name)} has type {kind}; supported types: {', '.join(DTYPES)}")


def _check(path: pathlib.Path) -> None:
    """Raise WeightsError if a file cannot be read, or its header does not describe it byte for byte."""
    try:
        if path.exists() and not path.is_file():
            raise WeightsError(f"{path}: not a file; name a folder of safetensors files")
        with safetensors.safe_open(path, "numpy"):
            pass
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror or error}; name a folder of safetensors files") from None
    except safetensors.SafetensorError as error:
        if "header too large" in str(error):  # the first bytes are text, not a length
            raise WeightsError(f"{path}: not a safetensors file; in a git clone, run `git lfs pull`") from None
        why = shown(str(error).removeprefix("Error while deserializing header: "))
        raise WeightsError(f"{path}: truncated, or its header is wrong ({why}); copy it again") from None
