# SPDX-License-Identifier: Apache-2.0
"""Tables of puzzles: CSV files with the columns source, question, answer, rating, a puzzle a row."""

import csv
import itertools
import math
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from input_pipeline.errors import DataError
from input_pipeline.progress import progress

COLUMNS = ("question", "answer", "rating")  # that are read
TOLD_ROWS = 1 << 14  # at once


class Row(NamedTuple):
    """A row as text, and the line of the file that it ends on."""

    line: int
    question: str
    answer: str
    rating: float


class Table(NamedTuple):
    """Some rows of a file.

    Attributes:
        path: of the file.
        lines: int [N], where each row stands.
        questions, answers: uint8 [N, cells], characters by their codes.
    """

    path: Path
    lines: np.ndarray
    questions: np.ndarray
    answers: np.ndarray

    def reject(self, wrong: np.ndarray, what: str) -> None:
        """Raise a DataError that names the first of the rows, bool [N], that are wrong."""
        if wrong.any():
            raise DataError(f"{self.path}:{self.lines[wrong.argmax()]}: {what}")


def read(
    path: Path, *, cells: int, least_rating: float, count: int | None, seed: int, announce: Callable[[str], object]
) -> Table:
    """Return the rows of a file whose rating is at least so much: all, or so many of them drawn with the seed.

    Every row is looked at, so that one which is wrong is named whether it is drawn or not.

    Raises:
        DataError: a row is malformed, or there are fewer than `count`.
    """
    with progress(f"reading {path.name}", None, announce, "rows") as advance:
        fitting = (row for row in _rows(path, cells, advance) if row.rating >= least_rating)
        found = list(fitting) if count is None else _drawn(fitting, count, np.random.default_rng(seed))
    harder = f" with a rating of at least {least_rating:g} (data.puzzle_min_difficulty)" if least_rating else ""
    if not found:
        raise DataError(f"{path}: has no puzzle{harder}")
    if count is not None and count > len(found):
        few = f"data.puzzle_count={count:,} is more than the {len(found):,} puzzles{harder} of {path}"
        raise DataError(f"{few}; use data.puzzle_count={len(found)}")
    questions, answers = (_codes([row[place] for row in found], cells) for place in (1, 2))
    return Table(path, np.array([row.line for row in found]), questions, answers)


def _drawn(rows: Iterator[Row], count: int, generator: np.random.Generator) -> list[Row]:
    """Return so many rows, each as likely as another, in the order of the file.

    Source: Li, "Reservoir-sampling algorithms of time complexity O(n(1 + log(N/n)))", 1994, algorithm L.
    """
    kept, weight = list(itertools.islice(rows, count)), 1.0
    while True:
        weight *= generator.random() ** (1 / count)
        skipped = int(math.log(1 - generator.random()) / math.log1p(-weight))
        row = next(itertools.islice(rows, skipped, None), None)
        if row is None:
            return sorted(kept)
        kept[generator.integers(count)] = row


def codes(table: Table, characters: str, tokens: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Return questions and answers, uint8 [N, cells], each character as its place in `characters`.

    Args:
        tokens: which of the characters may stand in a "question", and in an "answer".

    Raises:
        DataError: a row has another character, or a cell that the question gives another in its answer.
    """
    places = np.zeros(256, np.uint8)
    places[np.frombuffer(characters.encode(), np.uint8)] = np.arange(len(characters))
    for column, values in (("question", table.questions), ("answer", table.answers)):
        known = np.isin(np.arange(256), np.frombuffer(tokens[column].encode(), np.uint8))[values]
        table.reject(~known.all(axis=1), f"{column} has a character that is none of {tokens[column]!r}")
    return places[table.questions], places[table.answers]


def _codes(texts: list[str], cells: int) -> np.ndarray:
    return np.frombuffer("".join(texts).encode("latin-1", "replace"), np.uint8).reshape(-1, cells)


def _rows(path: Path, cells: int, advance: Callable[[int], object]) -> Iterator[Row]:
    """Yield the rows of a file, and tell how many came.

    Raises:
        DataError: it cannot be read, a column is missing, or a row has no rating or a text of another length.
    """
    for number, row in enumerate(_parsed(path, cells), start=1):
        if number % TOLD_ROWS == 0:
            advance(TOLD_ROWS)
        yield row


def _parsed(path: Path, cells: int) -> Iterator[Row]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            yield from _checked(path, csv.reader(file), cells)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: no CSV file in UTF-8 ({error})") from error


def _checked(path: Path, reader, cells: int) -> Iterator[Row]:
    header = next(reader, None)
    if header is None:
        raise DataError(f"{path}: is empty; it needs a line of column names, {', '.join(COLUMNS)} among them")
    missing = [column for column in COLUMNS if column not in header]
    if missing:
        raise DataError(f"{path}:1: has no column {missing[0]!r}, only {', '.join(header)}")
    cut = itemgetter(*(header.index(column) for column in COLUMNS))
    for row in filter(None, reader):
        if len(row) != len(header):
            raise DataError(f"{path}:{reader.line_num}: has {len(row)} columns, not {len(header)}")
        question, answer, rating = cut(row)
        if not len(question) == len(answer) == cells:
            column, text = ("question", question) if len(question) != cells else ("answer", answer)
            raise DataError(f"{path}:{reader.line_num}: {column} has {len(text)} characters, not {cells}")
        try:
            yield Row(reader.line_num, question, answer, float(rating))
        except ValueError as error:
            raise DataError(f"{path}:{reader.line_num}: rating is {rating!r}, no number") from error
