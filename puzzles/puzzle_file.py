# SPDX-License-Identifier: Apache-2.0
"""Reads a Sudoku or a maze from a typed text file, and formats boards for a terminal."""

import collections
import pathlib
from typing import NamedTuple

import numpy as np

from configs.errors import ConfigError
from input_pipeline.puzzles.maze import CHARACTERS
from input_pipeline.puzzles.sudoku_solver import BOXES

EMPTY, IGNORED = ".0_", " \t|-+"  # of a Sudoku
RULES = (
    f"a Sudoku consists of digits, with one of {' '.join(EMPTY)} for each empty cell, and | - + anywhere; "
    "a maze consists of # (wall), space, S (start), G (goal) and o (path)"
)


class Puzzle(NamedTuple):
    """A puzzle as input of a model."""

    kind: str  # sudoku or maze
    tokens: np.ndarray  # int32 [height, width]: Sudoku digit + 1, 1 being an empty cell; maze 1 to 5 for "# SGo"


class Cell(NamedTuple):
    """A cell of a Sudoku as it was typed; line and column from 1."""

    digit: int
    line: int
    column: int


def read(path: pathlib.Path) -> Puzzle:
    """Return the puzzle of a file: a maze if it has any of #, S, G and o, else a Sudoku.

    A Sudoku of 16, 36 or 81 cells is 4 x 4, 6 x 6 (boxes of 2 rows and 3 columns) or 9 x 9, whatever its lines are.
    All lines of a maze are equally long, the spaces at their ends included; it has one S and one G. Raises ConfigError,
    with file and line, if there is no puzzle, or it breaks a rule.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a text file with a Sudoku or a maze") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not text; {RULES}") from None
    return parse(lines, path)


def parse(lines: list[str], source: pathlib.Path | str) -> Puzzle:
    """Return the puzzle in lines of text, as `read` does; messages call the text `source`."""
    if not any(line.strip() for line in lines):
        raise ConfigError(f"{source}: is empty; {RULES}")
    is_maze = set("".join(lines)) & set(CHARACTERS) - {" "}
    return _maze(source, lines) if is_maze else _sudoku(source, lines)


def board_text(kind: str, board: np.ndarray) -> str:
    """Return tokens [height, width] as lines of text, which `read` can read; ? is a token of another kind."""
    if kind == "maze":
        letters = "?" + CHARACTERS
        return "\n".join("".join(letters[token * (token < len(letters))] for token in row) for row in board)
    height, width = BOXES[len(board)]
    words = [[digit(token, len(board)) for token in row] for row in board]
    spaced = [" | ".join(" ".join(row[at : at + width]) for at in range(0, len(row), width)) for row in words]
    rule = "+".join("-" * len(part) for part in spaced[0].split("|"))
    bands = ["\n".join(spaced[at : at + height]) for at in range(0, len(spaced), height)]
    return f"\n{rule}\n".join(bands)


def digit(token: int, side: int) -> str:
    """Return the character of a Sudoku cell."""
    return "." if token == 1 else str(token - 1) if 2 <= token <= side + 1 else "?"


def _maze(source: pathlib.Path | str, lines: list[str]) -> Puzzle:
    numbered = [(number, line) for number, line in enumerate(lines, 1)]
    while not numbered[-1][1]:
        numbered.pop()
    while not numbered[0][1]:
        numbered.pop(0)
    first, width = numbered[0][0], len(numbered[0][1])
    for number, line in numbered:
        wrong = [column for column, character in enumerate(line, 1) if character not in CHARACTERS]
        if wrong:
            raise ConfigError(f"{source}:{number}: {line[wrong[0] - 1]!r} in column {wrong[0]} is not a cell; {RULES}")
        if len(line) != width:
            raise ConfigError(
                f"{source}:{number}: {len(line)} cells, but line {first} has {width}; make all lines of a maze equally "
                "long, with the spaces at their ends"
            )
    for mark, what in (("S", "start"), ("G", "goal")):
        where = [number for number, line in numbered for character in line if character == mark]
        if not where:
            raise ConfigError(f"{source}:{first}: the maze has no {mark}; put one {mark} where its {what} is")
        if len(where) > 1:
            raise ConfigError(
                f"{source}:{where[1]}: a second {mark}, after the one in line {where[0]}; keep one {what}"
            )
    return Puzzle("maze", np.array([[CHARACTERS.index(c) + 1 for c in line] for _, line in numbered], np.int32))


def _sudoku(source: pathlib.Path | str, lines: list[str]) -> Puzzle:
    cells = []
    for number, line in enumerate(lines, 1):
        for column, character in enumerate(line, 1):
            if character in EMPTY or character in "123456789":
                cells.append(Cell(0 if character in EMPTY else int(character), number, column))
            elif character not in IGNORED:
                raise ConfigError(f"{source}:{number}: {character!r} in column {column} is not a cell; {RULES}")
    side = next((side for side in BOXES if side**2 == len(cells)), None)
    if side is None:
        raise ConfigError(
            f"{source}:{_odd_line(cells)}: the Sudoku has {len(cells)} cells; it needs 16, 36 or 81, including "
            "empty ones, each written as . or 0 or _"
        )
    _check_sudoku(source, cells, side)
    return Puzzle("sudoku", np.array([cell.digit + 1 for cell in cells], np.int32).reshape(side, side))


def _odd_line(cells: list[Cell]) -> int:
    """Return the first line whose number of cells differs from most lines', or else the last line."""
    counts = collections.Counter(cell.line for cell in cells)
    usual = collections.Counter(counts.values()).most_common(1)
    return next((line for line, count in counts.items() if count != usual[0][0]), max(counts, default=1))


def _check_sudoku(source: pathlib.Path | str, cells: list[Cell], side: int) -> None:
    """Raise ConfigError for a digit too large for the size, or a digit twice in a row, column or box."""
    height, width = BOXES[side]
    met = {}
    for place, cell in enumerate(cells):
        row, column = divmod(place, side)
        if cell.digit > side:
            raise ConfigError(
                f"{source}:{cell.line}: {cell.digit} in column {cell.column}; a Sudoku of {side} x {side} "
                f"has digits from 1 to {side}"
            )
        units = {"row": row, "column": column, "box": (row // height, column // width)}
        for unit, which in units.items() if cell.digit else ():
            other = met.setdefault((unit, which, cell.digit), cell)
            if other is not cell:
                raise ConfigError(
                    f"{source}:{cell.line}: a second {cell.digit} in one {unit}, after the one in line {other.line}, "
                    f"column {other.column}; correct one of them"
                )
