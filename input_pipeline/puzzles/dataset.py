# SPDX-License-Identifier: Apache-2.0
"""Reads and writes puzzle data sets, in the format in which they are published.

A folder has `train/`, `test/` and `identifiers.json`, the list of names of identifiers, "<blank>" first. A split has
`dataset.json` and five arrays, where SET is the one name in its `sets`:

    SET__inputs.npy, SET__labels.npy      [examples, cells], integers
    SET__puzzle_identifiers.npy           [puzzles]
    SET__puzzle_indices.npy               [puzzles + 1], the first example of each, and the end
    SET__group_indices.npy                [groups + 1], the first puzzle of each, and the end

A group is a Sudoku, a maze or an ARC task with all its augmentations. A puzzle is one of these versions. An example is
a question with its answer.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from files.atomic import writing
from files.json_reader import JsonError, Object
from files.json_reader import read_json as read_checked
from files.numpy_reader import ArrayFileError, map_integers
from input_pipeline import cache
from input_pipeline.cache import write_json
from input_pipeline.errors import DataError
from input_pipeline.threads import in_threads

SET = "all"
BLANK = "<blank>"
ARRAYS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
DIMS = (2, 2, 1, 1, 1)  # number of dimensions of each
JSON_BYTES = 256 << 20  # limit for a file; ARC's million names of identifiers take 50 MB
TOKENS = 1 << 31  # the most that int32 can number


class Metadata(Object):
    """The content of dataset.json."""

    pad_id: int
    ignore_label_id: int | None
    blank_identifier_id: int
    vocab_size: int
    seq_len: int
    num_puzzle_identifiers: int
    sets: list[str]


@dataclass(frozen=True)
class Split:
    """One split; its large arrays are mapped into memory."""

    folder: Path  # of the data set
    metadata: Metadata
    inputs: np.ndarray  # [examples, cells]
    labels: np.ndarray  # [examples, cells]
    identifiers: np.ndarray  # [puzzles]
    puzzles: np.ndarray  # [puzzles + 1], first examples
    groups: np.ndarray  # [groups + 1], first puzzles


@dataclass
class Plan:
    """A split to write."""

    seq_len: int
    vocab_size: int
    sizes: list  # for each group, the list of the numbers of examples of its puzzles
    examples: Callable[[range], tuple[np.ndarray, np.ndarray]]  # groups -> (inputs, labels), uint8 [n, seq_len] each
    identifiers: np.ndarray | None = None  # of each puzzle, int [puzzles]; None: all blank
    together: int = 1  # groups per call of `examples`; the last call may have fewer

    @cached_property
    def num_examples(self) -> int:
        return sum(map(sum, self.sizes))


def write(folder: Path, splits: dict[str, Plan], identifiers: list[str], advance: Callable[[int], object]) -> None:
    """Write a data set into a folder; threads make its groups in parallel.

    Args:
        identifiers: their names, the blank one first.
        advance: called with the number of bytes after each write.
    """
    for name, plan in splits.items():
        (folder / name).mkdir(parents=True)
        _write_split(folder / name, plan, len(identifiers), advance)
    write_json(folder / "identifiers.json", identifiers)


def open_split(folder: Path, name: str) -> Split:
    """Open a split of a data set; DataError if a file is missing, cannot be read, or contradicts the others."""
    place = folder / name
    metadata = read_json(place / "dataset.json", Metadata)
    if len(metadata["sets"]) != 1 or not re.fullmatch(r"[\w.-]{1,100}", metadata["sets"][0]):
        raise DataError(f"{place / 'dataset.json'}: sets={metadata['sets']!r:.80}; name exactly one set")
    files = [place / f"{metadata['sets'][0]}__{array}.npy" for array in ARRAYS]
    arrays = [_mapped(*of) for of in zip(files, DIMS, strict=True)]
    split = Split(folder, metadata, arrays[0], arrays[1], *(np.asarray(array, np.int64) for array in arrays[2:]))
    _check(split, place)
    return split


def digest(folder: Path) -> str:
    """Return a digest of the content of a data set's files; it does not depend on the path of the folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".npy", ".json")]
    return digest_of(files, [str(path.relative_to(folder)) for path in files])


def digest_of(files: list[Path], facts) -> str:
    """Return a digest of the content of files and of JSON-serialisable facts; DataError if a file cannot be read."""
    with closing(in_threads(_digest_of_file, files)) as digests:
        return cache.digest(json.dumps(facts, sort_keys=True).encode(), *digests)


def read_json(path: Path, schema):
    """Return the content of a JSON file; DataError if it is missing, not JSON, or not of the schema."""
    try:
        return read_checked(path, schema, max_bytes=JSON_BYTES)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; data.path must name the folder that has it") from error
    except JsonError as error:
        raise DataError(f"{error}; fix the file") from None


def _digest_of_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, hashlib.blake2b).digest()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; data.path must name the folder that has it") from error


def _mapped(path: Path, ndim: int) -> np.ndarray:
    try:
        return map_integers(path, ndim)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except ArrayFileError as error:
        raise DataError(str(error)) from None


def _check(split: Split, place: Path) -> None:
    examples, seq_len, metadata = len(split.inputs), split.metadata["seq_len"], split.metadata
    lowest, highest = split.identifiers.min(initial=0), split.identifiers.max(initial=0)
    rules = (
        (0 < metadata["vocab_size"] <= TOKENS, f"vocab_size={metadata['vocab_size']}"),
        (0 <= metadata["pad_id"] < metadata["vocab_size"], f"pad_id={metadata['pad_id']} is not a token"),
        (
            0 <= metadata["blank_identifier_id"] < metadata["num_puzzle_identifiers"] <= TOKENS,
            f"blank_identifier_id={metadata['blank_identifier_id']} is not an identifier",
        ),
        (split.inputs.shape == (examples, seq_len), f"inputs have the shape {split.inputs.shape}"),
        (split.labels.shape == (examples, seq_len), f"labels have the shape {split.labels.shape}"),
        (_covers(split.puzzles, examples), "puzzle_indices do not ascend from 0 to the number of examples"),
        (_covers(split.groups, len(split.identifiers)), "group_indices do not ascend from 0 to the number of puzzles"),
        (len(split.puzzles) == len(split.identifiers) + 1, "puzzle_indices and puzzle_identifiers differ in length"),
        (
            0 <= lowest <= highest < metadata["num_puzzle_identifiers"],
            f"a puzzle's identifier is {lowest if lowest < 0 else highest}",
        ),
    )
    for holds, what in rules:
        if not holds:
            raise DataError(
                f"{place}: {what}, in a data set of {examples:,} examples with seq_len={seq_len} and "
                f"num_puzzle_identifiers={metadata['num_puzzle_identifiers']}; build it again"
            )


def _covers(indices: np.ndarray, number: int) -> bool:
    ascending = len(indices) > 1 and bool((np.diff(indices) > 0).all())
    return ascending and indices[0] == 0 and indices[-1] == number


def _write_split(place: Path, plan: Plan, num_identifiers: int, advance: Callable[[int], object]) -> None:
    sizes = np.concatenate([np.asarray(of_group, np.int32) for of_group in plan.sizes])
    identifiers = np.zeros(len(sizes), np.int32) if plan.identifiers is None else plan.identifiers
    small = {
        "puzzle_identifiers": identifiers.astype(np.int32),
        "puzzle_indices": indices_of(sizes),
        "group_indices": indices_of(list(map(len, plan.sizes))),
    }
    for name, array in small.items():
        np.save(place / f"{SET}__{name}.npy", array)
    _write_examples(place, plan, advance)
    metadata = {
        "pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": plan.vocab_size,
        "seq_len": plan.seq_len, "num_puzzle_identifiers": num_identifiers, "total_groups": len(plan.sizes),
        "mean_puzzle_examples": float(sizes.mean()), "total_puzzles": len(sizes), "sets": [SET],
    }  # fmt: skip
    write_json(place / "dataset.json", metadata)


def indices_of(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the first index of each of the parts, and the end: int32 [parts + 1], int64 if int32 cannot number it."""
    indices = np.cumsum(np.concatenate([[0], sizes]), dtype=np.int64)
    return indices if indices[-1] >= 1 << 31 else indices.astype(np.int32)


def _write_examples(place: Path, plan: Plan, advance: Callable[[int], object]) -> None:
    """Write inputs and labels in order, without a memory map: a full disk would end the process."""
    header = {"descr": "|u1", "fortran_order": False, "shape": (plan.num_examples, plan.seq_len)}
    every = range(len(plan.sizes))
    made = in_threads(plan.examples, (every[first : first + plan.together] for first in every[:: plan.together]))
    with (
        writing(place / f"{SET}__inputs.npy") as inputs,
        writing(place / f"{SET}__labels.npy") as labels,
        closing(made),
    ):
        for file in (inputs, labels):
            np.lib.format.write_array_header_1_0(file, header)
        for arrays in made:
            for file, array in zip((inputs, labels), arrays, strict=True):
                file.write(array.astype(np.uint8, copy=False).tobytes())
            advance(sum(array.size for array in arrays))
