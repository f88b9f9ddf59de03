# SPDX-License-Identifier: Apache-2.0
"""Reads tables of puzzles: CSV files with the columns source, question, answer and rating, one puzzle per row."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from input_pipeline.errors import DataError

TYPES = {
    "question": pa.large_string(),
    "answer": pa.large_string(),
    "rating": pa.float64(),
}  # of the columns that are read
FIRST_ROW = 2  # in messages; the column names are row 1


class Table(NamedTuple):
    """Some rows of a file."""

    path: Path  # of the file
    rows: np.ndarray  # int [N], their numbers in the file
    questions: np.ndarray  # uint8 [N, cells], character codes
    answers: np.ndarray  # uint8 [N, cells], character codes

    def reject(self, wrong: np.ndarray, what: str) -> None:
        """Raise DataError with the first row where `wrong`, bool [N], is true."""
        if wrong.any():
            raise DataError(f"{self.path}:{self.rows[wrong.argmax()]}: {what}")


def read(path: Path, *, cells: int, least_rating: float, count: int | None, seed: int) -> Table:
    """Return the rows of a file with a rating of at least `least_rating`: all, or `count` of them at random.

    The lengths and the rating of every row are checked, drawn or not; `codes` checks the characters of drawn rows.
    Raises DataError if a row is malformed, or there are fewer than `count`.
    """
    table = _parsed(path)
    for column in ("question", "answer"):
        lengths = pc.utf8_length(table[column]).to_numpy()
        if (wrong := lengths != cells).any():
            place = wrong.argmax()
            raise DataError(f"{path}:{FIRST_ROW + place}: {column} has {lengths[place]} characters, not {cells}")
    ratings = table["rating"].to_numpy()
    if (wrong := np.isnan(ratings)).any():  # a comparison with NaN would drop the row
        raise DataError(f"{path}:{FIRST_ROW + wrong.argmax()}: rating is not a number")
    found = np.flatnonzero(ratings >= least_rating)
    harder = f" with a rating of at least {least_rating:g} (data.puzzle_min_difficulty)" if least_rating else ""
    if not found.size:
        raise DataError(f"{path}: has no puzzles{harder}")
    if count is not None and count > len(found):
        few = f"data.puzzle_count={count:,} is more than the {len(found):,} puzzles{harder} of {path}"
        raise DataError(f"{few}; use --config.data.puzzle_count={len(found)}")
    if count is not None:
        found = np.sort(np.random.default_rng(seed).choice(found, count, replace=False))
    texts = ("".join(table[column].take(found).to_pylist()) for column in ("question", "answer"))
    codes = (np.frombuffer(text.encode("latin-1", "replace"), np.uint8).reshape(-1, cells) for text in texts)
    return Table(path, FIRST_ROW + found, *codes)


def codes(table: Table, characters: str, tokens: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Return questions and answers, uint8 [N, cells]: the index of each character in `characters`.

    `tokens` are the characters that are allowed in a "question", and in an "answer". Raises DataError if a row has
    another one.
    """
    places = np.zeros(256, np.uint8)
    places[np.frombuffer(characters.encode(), np.uint8)] = np.arange(len(characters))
    for column, values in (("question", table.questions), ("answer", table.answers)):
        known = np.isin(np.arange(256), np.frombuffer(tokens[column].encode(), np.uint8))[values]
        table.reject(~known.all(axis=1), f"{column} has a character that is not one of {tokens[column]!r}")
    return places[table.questions], places[table.answers]


def _parsed(path: Path) -> pa.Table:
    """Return the columns of TYPES; one thread reads them, because only then errors name a row."""
    options = csv.ConvertOptions(include_columns=list(TYPES), column_types=TYPES, null_values=[])
    try:
        return csv.read_csv(path, csv.ReadOptions(use_threads=False), convert_options=options)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except pa.ArrowException as error:
        said = " ".join(str(error).split())[:200]
        raise DataError(
            f"{path}: not a CSV file with the columns {', '.join(TYPES)}, the last a number ({said}); fix the file"
        ) from error
