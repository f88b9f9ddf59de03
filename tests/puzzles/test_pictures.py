# SPDX-License-Identifier: Apache-2.0
"""Boards to look at: whole in themselves, true to the answers, safe, the same every time, and read back from text."""

import re
import xml.etree.ElementTree

import numpy as np
import pytest

from puzzles import pictures, puzzle_file
from puzzles.pictures import Board, board_text

EVIL = "<script>alert('&')</script>"
FOUR = np.array([[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]) + 1
MAZE = np.array([[3, 2, 2], [1, 1, 2], [4, 2, 2]])
PATH = np.array([[3, 5, 5], [1, 1, 5], [4, 5, 5]])


def sudoku(**changes) -> Board:
    given = np.where(np.eye(4, dtype=bool), FOUR, 1)
    first = FOUR.copy()
    first[0, 1], first[2, 3] = 5, 1
    board = Board("sudoku", (4, 4), given.ravel(), [first.ravel(), FOUR], [0.125, 2 / 3], FOUR.ravel(), "a board")
    return board._replace(**changes)


def maze() -> Board:
    return Board("maze", (3, 3), MAZE, [MAZE, PATH], [0.1, 0.9], PATH)


def arc() -> Board:
    """A grid of 2 x 3 that begins at (5, 7) of its canvas; the last prediction has no colour at all."""
    given, truth = np.zeros((30, 30), int), np.full((30, 30), -100)
    given[5:7, 7:10], truth[5:7, 7:10], truth[7, 7:10] = 2, [[2, 3, 4], [5, 6, 11]], 1
    wrong = np.maximum(truth, 0)
    wrong[5, 8] = 9
    return Board("arc", (30, 30), given, [wrong, np.maximum(truth, 0), np.zeros((30, 30), int)], [0, 0.5, 1], truth)


def figures(board: Board) -> list[xml.etree.ElementTree.Element]:
    """The figures of a board's page; it has to be XML for that."""
    body = re.search(r"<body>.*</body>", pictures.page([board], "title"), re.DOTALL)[0]
    return list(xml.etree.ElementTree.fromstring(body).iter("figure"))


def drawn(figure, kind: str) -> list:
    return [part for part in figure.iter() if kind in part.get("class", "").split()]


def cells(figure, kind: str) -> set[tuple[int, int]]:
    """Rows and columns in which strokes of a kind begin."""
    corners = [part for path in drawn(figure, kind) for part in re.findall(r"M(\d+) (\d+)m", path.get("d"))]
    return {(int(y) // pictures.UNIT, int(x) // pictures.UNIT) for x, y in corners}


@pytest.mark.parametrize("board", [sudoku(), maze()], ids=["sudoku", "maze"])
def test_text_is_read_back(tmp_path, board):
    for tokens in (board.given, board.truth):
        (tmp_path / "puzzle.txt").write_text(board_text(tokens, board.size, board.kind))
        kind, found = puzzle_file.read(tmp_path / "puzzle.txt")
        assert kind == board.kind
        np.testing.assert_array_equal(found, np.reshape(tokens, board.size))


@pytest.mark.parametrize(("side", "rules"), [(4, 1), (6, 2), (9, 2)])
def test_text_of_a_sudoku_has_its_boxes(side, rules):
    lines = board_text(np.ones(side**2, int), (side, side)).splitlines()
    assert len({len(line) for line in lines}) == 1 and len(lines) == side + rules
    height, width = puzzle_file.BOXES[side]
    assert "|" not in lines[height] and lines[0].count("|") == side // width - 1
    assert [at for at, line in enumerate(lines) if "-" in line] == [(height + 1) * n + height for n in range(rules)]


def test_text_shows_what_a_kind_has_not():
    assert board_text([0, 6, 1, 5] * 4, (4, 4)).splitlines()[0] == "? ? | . 4"
    assert board_text([0, 1, 2, 6], (2, 2), "maze") == "?#\n ?"
    assert board_text([1, 2, 11, 0, 12, 3, 1, 1, 1], (3, 3), "arc") == " 09\n  1"


def test_a_page_needs_nothing_else_and_is_the_same_every_time():
    boards = [sudoku(), maze(), arc()]
    text = pictures.page(boards, "title")
    assert text == pictures.page(boards, "title")
    addresses = set(re.findall(r"https?://[^\"' )]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script|<link|<img|@import|url\(|src=", text)
    used = {name for names in re.findall(r' class="([^"]*)"', text) for name in names.split()}
    assert all(re.search(rf"\.{name}\b", pictures.CSS) for name in used)


def test_what_a_name_says_is_text():
    text = pictures.page([sudoku(name=EVIL)], EVIL)
    assert EVIL not in text and text.count("&lt;script&gt;") == 3


def test_a_sudoku_shows_givens_mistakes_and_changes():
    puzzle, first, second, truth = figures(sudoku())
    assert [len(drawn(figure, "given")) for figure in (puzzle, first, second, truth)] == [4, 4, 4, 4]
    assert cells(first, "wrong") == {(0, 1), (2, 3)} and not drawn(first, "changed")
    assert [part.text for part in drawn(first, "bad")] == ["4"]  # an empty cell is wrong, and no digit
    assert not drawn(second, "wrong") and drawn(second, "changed")[0].get("d") == "M20 0h20v20h-20zM60 40h20v20h-20z"
    assert "".join(part.text for part in truth.iter("{http://www.w3.org/2000/svg}text")) == "1234341221434321"
    captions = ["".join(figure.find("figcaption").itertext()) for figure in (puzzle, first, second, truth)]
    said = ["puzzle", "step 1 halt 0.125 · 2 wrong", "step 2 halt 0.667 · 2 changed · right", "truth"]
    assert captions == said
    assert [part.get("style") for part in second.iter("i")] == ["width:66.7%"]


def test_without_labels_nothing_is_wrong():
    shown = figures(sudoku(truth=None))
    assert len(shown) == 3 and not any(drawn(figure, "wrong") for figure in shown)
    assert "".join(shown[1].find("figcaption").itertext()) == "step 1 halt 0.125"


def test_without_labels_what_is_known_to_be_wrong_is_struck_and_the_verdict_is_shown():
    """As on the page of generate.py: a board that changed givens had no red stroke."""
    board = sudoku(
        truth=None, wrong=[np.eye(4, dtype=bool), np.zeros(16, bool)], verdict="NOT a solution: it changes 4 of <4>"
    )
    shown = figures(board)
    assert cells(shown[1], "wrong") == {(n, n) for n in range(4)} and not drawn(shown[2], "wrong")
    assert "".join(shown[1].find("figcaption").itertext()) == "step 1 halt 0.125 · 4 wrong"
    assert "NOT a solution: it changes 4 of &lt;4&gt;" in pictures.page([board], "title")


def test_a_maze_shows_walls_path_and_marks():
    _, first, second, _ = figures(maze())
    assert cells(first, "wrong") == cells(second, "ring") == {(0, 1), (0, 2), (1, 2), (2, 1), (2, 2)}
    assert drawn(second, "path")[0].get("d") == "M20 0h40v20h-40zM40 20h20v20h-20zM20 40h40v20h-40z"
    assert drawn(second, "wall")[0].get("d") == "M0 20h40v20h-40z"
    assert [part.text for part in drawn(second, "mark")] == ["S", "G"]


def test_an_arc_grid_is_cut_out_of_its_canvas_and_padding_is_no_mistake():
    shown = figures(arc())
    boxes = [figure.find("{http://www.w3.org/2000/svg}svg").get("viewBox") for figure in shown]
    assert boxes == ["-1 -1 62 42"] * 3 + ["-1 -1 62 62", "-1 -1 62 42"]
    puzzle, first, second, empty, truth = shown
    assert drawn(puzzle, "c0")[0].get("d") == "M0 0h60v20h-60zM0 20h60v20h-60z"
    assert cells(first, "wrong") == cells(second, "white") == {(0, 1)} and not drawn(second, "wrong")
    assert len(cells(empty, "wrong")) == 9
    assert {kind for kind in range(10) if drawn(truth, f"c{kind}")} == {0, 1, 2, 3, 4, 9}
