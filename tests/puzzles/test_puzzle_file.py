# SPDX-License-Identifier: Apache-2.0
"""Puzzles as people type them, and the messages about their mistakes."""

import numpy as np
import pytest

from configs.errors import ConfigError
from puzzles import puzzle_file

NINE = """\
5 3 . | . 7 . | . . .
6 . . | 1 9 5 | . . .
. 9 8 | . . . | . 6 .
------+-------+------
8 . . | . 6 . | . . 3
4 . . | 8 . 3 | . . 1
7 . . | . 2 . | . . 6
------+-------+------
. 6 . | . . . | 2 8 .
. . . | 4 1 9 | . . 5
. . . | . 8 . | . 7 9
"""
DIGITS = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"
FOUR = "1.3.\n..1.\n2...\n...4\n"
MAZE = "#####\n#S o#\n# #G#\n#####\n"


def read(folder, text: str) -> puzzle_file.Puzzle:
    (folder / "puzzle.txt").write_bytes(text.encode() if isinstance(text, str) else text)
    return puzzle_file.read(folder / "puzzle.txt")


@pytest.mark.parametrize(
    "text", [NINE, DIGITS, DIGITS.replace("0", "_"), "\n" + NINE.replace("\n", "\r\n"), "\ufeff" + NINE]
)
def test_a_sudoku_is_found_in_any_dress(tmp_path, text):
    kind, tokens = read(tmp_path, text)
    assert kind == "sudoku" and tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, np.array([int(digit) + 1 for digit in DIGITS]).reshape(9, 9))


@pytest.mark.parametrize(("text", "side"), [(FOUR, 4), ("12..56\n" + 5 * "......\n", 6), (NINE, 9)])
def test_the_size_is_that_of_its_cells(tmp_path, text, side):
    assert read(tmp_path, text).tokens.shape == (side, side)


def test_boxes_of_six_are_two_rows_high_and_three_columns_wide(tmp_path):
    read(tmp_path, "1.....\n......\n.1....\n" + 3 * "......\n")
    with pytest.raises(ConfigError, match="a second 1 in one box"):
        read(tmp_path, "1.....\n..1...\n" + 4 * "......\n")


def test_a_maze_is_its_characters(tmp_path):
    kind, tokens = read(tmp_path, "\n" + MAZE + "\n")
    assert kind == "maze"
    np.testing.assert_array_equal(tokens, [[1, 1, 1, 1, 1], [1, 3, 2, 5, 1], [1, 2, 1, 4, 1], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"puzzle.txt: is empty; a Sudoku consists of digits"),
        (" \n\n", r"puzzle.txt: is empty"),
        (b"\xff\xfe1", r"puzzle.txt: is not text"),
        (NINE.replace("1 9 5", "1 9 x"), r"puzzle.txt:2: 'x' in column 13 is not a cell; a Sudoku consists"),
        (NINE.replace("8 . . | . 6", "8 . | . 6"), r"puzzle.txt:5: the Sudoku has 80 cells; it needs 16, 36 or 81"),
        ("---\n", r"puzzle.txt:1: the Sudoku has 0 cells"),
        (FOUR.replace("4", "7"), r"puzzle.txt:4: 7 in column 4; a Sudoku of 4 x 4 has digits from 1 to 4"),
        (NINE.replace(". 9 8", "5 9 8"), r"puzzle.txt:3: a second 5 in one column, after the one in line 1, column 1"),
        (NINE.replace("5 3 .", "5 3 5"), r"puzzle.txt:1: a second 5 in one row"),
        (MAZE.replace("S o", "S ."), r"puzzle.txt:2: '.' in column 4 is not a cell; .* a maze consists of # \(wall\)"),
        (
            MAZE.replace("# #G#", "# #G"),
            r"puzzle.txt:3: 4 cells, but line 1 has 5; make all lines of a maze equally long",
        ),
        (MAZE.replace("S", " "), r"puzzle.txt:1: the maze has no S; put one S where its start is"),
        (MAZE.replace("o", "G"), r"puzzle.txt:3: a second G, after the one in line 2; keep one goal"),
    ],
)
def test_a_mistake_is_one_line_that_says_where_and_what_would_work(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent.txt: No such file or directory; name a text file"):
        puzzle_file.read(tmp_path / "absent.txt")
