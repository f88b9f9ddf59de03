# SPDX-License-Identifier: Apache-2.0
"""Boards to look at: whole in themselves, true to the answers, safe, the same every time, and read back from text."""

import re
import xml.etree.ElementTree

import numpy as np
import pytest

from reasoning import pictures
from reasoning.puzzle_file import BOXES, Puzzle, board_text, read

EVIL = "<script>alert('&')</script>"
FOUR = np.array([[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]) + 1
SUDOKU = Puzzle("sudoku", np.where(np.eye(4, dtype=bool), FOUR, 1))
MAZE = Puzzle("maze", np.array([[3, 2, 2], [1, 1, 2], [4, 2, 2]]))
PATH = np.array([[3, 5, 5], [1, 1, 5], [4, 5, 5]])


def answers(puzzle: Puzzle) -> list[tuple[np.ndarray, float]]:
    """Two steps, of which the second is right: of the Sudoku the first has a wrong digit and an empty cell."""
    first = FOUR.copy()
    first[0, 1], first[2, 3] = 5, 1
    return [(first.ravel(), 0.125), (FOUR, 2 / 3)] if puzzle is SUDOKU else [(MAZE.tokens, 0.1), (PATH, 0.9)]


def page(puzzle: Puzzle, title: str = "title") -> str:
    return pictures.page(puzzle, answers(puzzle), title)


def figures(puzzle: Puzzle) -> list[xml.etree.ElementTree.Element]:
    """The figures of a puzzle's page; it has to be XML for that."""
    body = re.search(r"<body>.*</body>", page(puzzle), re.DOTALL)[0]
    return list(xml.etree.ElementTree.fromstring(body).iter("figure"))


def drawn(figure, kind: str) -> list:
    return [part for part in figure.iter() if kind in part.get("class", "").split()]


@pytest.mark.parametrize("puzzle", [SUDOKU, MAZE], ids=["sudoku", "maze"])
def test_text_is_read_back(tmp_path, puzzle):
    for board in (puzzle.tokens, answers(puzzle)[1][0]):
        (tmp_path / "puzzle.txt").write_text(board_text(puzzle.kind, board))
        kind, found = read(tmp_path / "puzzle.txt")
        assert kind == puzzle.kind
        np.testing.assert_array_equal(found, board)


@pytest.mark.parametrize(("side", "rules"), [(4, 1), (6, 2), (9, 2)])
def test_text_of_a_sudoku_has_its_boxes(side, rules):
    lines = board_text("sudoku", np.ones((side, side), int)).splitlines()
    assert len({len(line) for line in lines}) == 1 and len(lines) == side + rules
    height, width = BOXES[side]
    assert "|" not in lines[height] and lines[0].count("|") == side // width - 1
    assert [at for at, line in enumerate(lines) if "-" in line] == [(height + 1) * n + height for n in range(rules)]


def test_text_shows_what_a_kind_has_not():
    assert board_text("sudoku", np.array([[0, 6, 1, 5]] * 4)).splitlines()[0] == "? ? | . 4"
    assert board_text("maze", np.array([[0, 1], [2, 6]])) == "?#\n ?"


@pytest.mark.parametrize("puzzle", [SUDOKU, MAZE], ids=["sudoku", "maze"])
def test_a_page_needs_nothing_else_and_is_the_same_every_time(puzzle):
    text = page(puzzle)
    assert text == page(puzzle)
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script|<link|<img|@import|url\(|src=", text)
    used = {name for names in re.findall(r' class="([^"]*)"', text) for name in names.split()}
    assert all(re.search(rf"\.{name}\b", pictures.CSS) for name in used)


def test_what_a_title_says_is_text():
    text = page(SUDOKU, EVIL)
    assert EVIL not in text and text.count("&lt;script&gt;") == 2


def test_a_sudoku_shows_givens_and_changes():
    puzzle, first, second = figures(SUDOKU)
    assert [len(drawn(figure, "given")) for figure in (puzzle, first, second)] == [4, 4, 4]
    assert not drawn(first, "changed")
    assert drawn(second, "changed")[0].get("d") == "M20 0h20v20h-20zM60 40h20v20h-20z"
    assert "".join(part.text for part in second.iter("{http://www.w3.org/2000/svg}text")) == "1234341221434321"
    captions = ["".join(figure.find("figcaption").itertext()) for figure in (puzzle, first, second)]
    assert captions == ["puzzle", "step 1 halt 0.125", "step 2 halt 0.667 · 2 changed"]
    assert [part.get("style") for part in second.iter("i")] == ["width:66.7%"]


def test_a_maze_shows_walls_path_and_marks():
    _, first, second = figures(MAZE)
    corners = re.findall(r"M(\d+) (\d+)m", drawn(second, "ring")[0].get("d"))
    changed = {(int(y) // pictures.UNIT, int(x) // pictures.UNIT) for x, y in corners}
    assert not drawn(first, "ring") and changed == {(0, 1), (0, 2), (1, 2), (2, 1), (2, 2)}
    assert drawn(second, "path")[0].get("d") == "M20 0h40v20h-40zM40 20h20v20h-20zM20 40h40v20h-40z"
    assert drawn(second, "wall")[0].get("d") == "M0 20h40v20h-40z"
    assert [part.text for part in drawn(second, "mark")] == ["S", "G"]
