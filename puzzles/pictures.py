# SPDX-License-Identifier: Apache-2.0
"""Shows a recursive model's answer at each supervision step, as an HTML page or as text for a terminal.

Boards are tokens as data sets have them. Sudoku: 1 an empty cell, 2 and up the digits from 1. Maze: 1 to 5 for
"# SGo". ARC: 1 the border, 2 to 11 the colours. 0 is padding, and a label of 0 or less is not a label.
"""

import html
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from input_pipeline.puzzles.maze import CHARACTERS as MAZE
from puzzles import puzzle_file
from puzzles.puzzle_file import BOXES, digit
from reporting import html_page

UNIT = 20  # SVG units per cell
SLASH = "M{x} {y}m3 17l14-14"
COLOURS = (
    "#000000", "#0074d9", "#ff4136", "#2ecc40", "#ffdc00", "#aaaaaa", "#f012be", "#ff851b", "#7fdbff", "#870c25",
)  # fmt: skip
WIDTHS = {"sudoku": 26, "maze": 10, "arc": 16}  # most pixels per cell
CELL_COLOURS = """
:root { --cell: #fff; --wall: #3c434d; --path: #6ea8dc; --start: #2e9e5b; --goal: #c2571a; --changed: #ffe08a;
  --wrong: #c4161c; }
@media (prefers-color-scheme: dark) { :root { --cell: #262b32; --wall: #8b95a3; --path: #2f6ea8; --start: #3fb872;
  --goal: #e07b3c; --changed: #6b5714; --wrong: #ff6b63; } }
"""
CSS = (
    CELL_COLOURS
    + """\
.boards { display: flex; flex-wrap: wrap; gap: 14px; align-items: flex-start; } figure { max-width: 340px; }
figcaption { font-size: 13px; margin-top: 6px; font-variant-numeric: tabular-nums; }
figcaption span { color: var(--soft); } .bar { height: 4px; margin-top: 4px; background: var(--rule); }
.bar i { display: block; height: 4px; background: var(--ink); }
svg { max-width: 100%; } text { font: 13px system-ui, sans-serif; fill: var(--ink);
  text-anchor: middle; } .given { font-weight: 700; } .mark { font-weight: 700; fill: #fff; }
.bad { fill: var(--wrong); } .cell { fill: var(--cell); } .wall { fill: var(--wall); } .path { fill: var(--path); }
.start { fill: var(--start); } .goal { fill: var(--goal); } .none { fill: var(--panel); }
.changed { fill: var(--changed); } .verdict { color: var(--ink); font-weight: 600; margin-top: 12px; }
.thin, .thick, .wrong, .halo, .ring, .white, .black { fill: none; stroke: var(--rule); }
.thick { stroke: var(--ink); stroke-width: 2; } .wrong { stroke: var(--wrong); stroke-width: 2.5; }
.halo { stroke: #fff; stroke-width: 5; } .ring { stroke: var(--changed); stroke-width: 3; }
.white { stroke: #fff; stroke-width: 2; } .black { stroke: #000; }
"""
)
LEGEND = """The answer of the model after each supervision step. Yellow, or a frame on colors: changed since the step
before. A red stroke: wrong; if the solution is not known, a given that was changed or a digit that occurs twice. The
bar is the probability of halting at that step."""
CSS += "".join(f".c{number} {{ fill: {colour}; }}\n" for number, colour in enumerate(COLOURS))


class Board(NamedTuple):
    """A puzzle and its answers."""

    kind: str  # sudoku, maze or arc
    size: tuple[int, int]  # (height, width) of the canvas; every board below has height * width cells, in any shape
    given: np.ndarray  # tokens of the puzzle
    steps: Sequence[np.ndarray]  # tokens predicted after each step
    halts: Sequence[float]  # probability of halting after each step
    truth: np.ndarray | None = None  # labels, or None if they are unknown
    name: str = ""  # its name on the page
    wrong: Sequence[np.ndarray] | None = None  # without labels, which cells are known to be wrong after each step, bool
    verdict: str = ""  # on the last answer, in words


def board_text(cells, size: tuple[int, int], kind: str = "sudoku") -> str:
    """Return a board as lines of text; those of an ARC canvas end with the last colour. A space has none."""
    rows = np.asarray(cells).reshape(size)
    if kind != "arc":
        return puzzle_file.board_text(kind, rows)
    lines = ["".join(str(token - 2) if 2 <= token <= 11 else " " for token in row).rstrip() for row in rows]
    return "\n".join(lines).rstrip()


def page(boards: Sequence[Board], title: str) -> str:
    """Return an HTML document that needs no other file, network or script; the same bytes for the same boards."""
    return html_page.document(title, "\n".join([f"<p>{LEGEND}</p>", *map(_section, boards)]), CSS)


def _section(board: Board) -> str:
    """Return the HTML of the puzzle, its steps and the truth, in one row."""
    given = np.asarray(board.given).reshape(board.size)
    truth = None if board.truth is None else np.asarray(board.truth).reshape(board.size)
    nowhere = np.zeros(board.size, bool)
    shown = [_figure(board.kind, given, given, nowhere, nowhere, "puzzle", "")]
    before = None
    for number, (step, halt) in enumerate(zip(board.steps, board.halts, strict=True), 1):
        cells = np.asarray(step).reshape(board.size)
        known = nowhere if board.wrong is None else np.asarray(board.wrong[number - 1]).reshape(board.size)
        wrong = known if truth is None else (truth > 0) & (cells != truth)
        changed = nowhere if before is None else cells != before
        counts = [] if before is None else [f"{int(changed.sum())} changed"]
        counts += [f"{int(wrong.sum())} wrong"] if wrong.any() else [] if truth is None else ["right"]
        caption = f"<b>step {number}</b> <span>{' · '.join([f'halt {halt:.3f}', *counts])}</span>"
        bar = f'<div class="bar"><i style="width:{100 * min(1.0, max(0.0, halt)):.1f}%"></i></div>'
        shown.append(_figure(board.kind, cells, given, changed, wrong, caption, bar))
        before = cells
    if truth is not None:
        shown.append(_figure(board.kind, np.maximum(truth, 0), given, nowhere, nowhere, "truth", ""))
    name = f"<h2>{html.escape(board.name)}</h2>\n" if board.name else ""
    verdict = f'\n<p class="verdict">{html.escape(board.verdict)}</p>' if board.verdict else ""
    return f'{name}<div class="boards">\n' + "\n".join(shown) + f"\n</div>{verdict}"


def _figure(kind: str, cells, given, changed, wrong, caption: str, bar: str) -> str:
    window = _window(cells, given, wrong) if kind == "arc" else np.s_[:, :]
    cells, given, changed, wrong = (array[window] for array in (cells, given, changed, wrong))
    height, width = cells.shape
    drawn = {"sudoku": _sudoku, "maze": _maze, "arc": _arc}[kind](cells, given, changed, wrong)
    box = f"-1 -1 {UNIT * width + 2} {UNIT * height + 2}"
    pixels = min(WIDTHS[kind] * width, 340)
    label = html.escape(board_text(cells, cells.shape, kind), quote=True).replace("\n", "&#10;")
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" width="{pixels}" viewBox="{box}">'
    return f"<figure>{svg}{drawn}</svg><figcaption>{caption}{bar}</figcaption></figure>"


def _window(cells, given, wrong) -> tuple[slice, slice]:
    """Return the part of an ARC canvas to show: from the start of the input to the last colour or mistake."""
    top, left = (_coloured(given).any(axis).argmax() for axis in (1, 0))
    seen = np.argwhere(_coloured(cells) | wrong)
    below, right = (seen.max(0) + 1).tolist() if len(seen) else (top + 1, left + 1)
    top, left = (min([start, *seen[:, axis].tolist()]) for axis, start in enumerate((int(top), int(left))))
    return np.s_[top:below, left:right]


def _coloured(cells) -> np.ndarray:
    return (cells >= 2) & (cells <= 11)


def _sudoku(cells, given, changed, wrong) -> str:
    side = len(cells)
    height, width = BOXES[side]
    drawn = _filled("cell", np.ones_like(cells, bool)) + _filled("changed", changed)
    for y, x in np.argwhere(cells != 1).tolist():
        kinds = ("given" if given[y, x] > 1 else "", "bad" if wrong[y, x] else "")
        drawn += _letter(" ".join(filter(None, kinds)), y, x, digit(cells[y, x], side))
    drawn += _strokes("wrong", wrong, "M{x} {y}m4 17h12")
    return drawn + _lines("thin", side, side, 1, 1) + _lines("thick", side, side, height, width)


def _maze(cells, given, changed, wrong) -> str:
    height, width = cells.shape
    drawn = _filled("none", (cells < 1) | (cells > len(MAZE)))
    for token, kind in enumerate(("wall", "cell", "start", "goal", "path"), 1):
        drawn += _filled(kind, cells == token)
    drawn += _strokes("ring", changed, "M{x} {y}m1.5 1.5h17v17h-17z")
    drawn += "".join(_letter("mark", y, x, MAZE[cells[y, x] - 1]) for y, x in np.argwhere((cells == 3) | (cells == 4)))
    drawn += f'<path class="thin" d="M0 0H{UNIT * width}V{UNIT * height}H0z"/>'
    return drawn + _strokes("halo", wrong, SLASH) + _strokes("wrong", wrong, SLASH)


def _arc(cells, given, changed, wrong) -> str:
    drawn = _filled("none", ~_coloured(cells))
    for colour in range(10):
        drawn += _filled(f"c{colour}", cells == colour + 2)
    drawn += _lines("thin", *cells.shape, 1, 1)
    for kind, frame in (("white", "M{x} {y}m2 2h16v16h-16z"), ("black", "M{x} {y}m3.5 3.5h13v13h-13z")):
        drawn += _strokes(kind, changed, frame)  # two strokes, visible on any colour
    return drawn + _strokes("halo", wrong, SLASH) + _strokes("wrong", wrong, SLASH)


def _letter(kind: str, y: int, x: int, letter: str) -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text{kind} x="{UNIT * x + 10}" y="{UNIT * y + 14.5}">{letter}</text>'


def _filled(kind: str, where) -> str:
    """Return one path over the cells of a mask, with a rectangle for each run of cells in a row."""
    drawn = ""
    for y, row in enumerate(where.astype(np.int8)):
        for start, end in np.flatnonzero(np.diff(row, prepend=0, append=0)).reshape(-1, 2).tolist():
            drawn += f"M{UNIT * start} {UNIT * y}h{UNIT * (end - start)}v{UNIT}h-{UNIT * (end - start)}z"
    return f'<path class="{kind}" d="{drawn}"/>' if drawn else ""


def _strokes(kind: str, where, stroke: str) -> str:
    """Return one path that draws the same stroke, from the corner {x} {y}, in each cell of a mask."""
    drawn = "".join(stroke.format(x=UNIT * x, y=UNIT * y) for y, x in np.argwhere(where).tolist())
    return f'<path class="{kind}" d="{drawn}"/>' if drawn else ""


def _lines(kind: str, height: int, width: int, down: int, across: int) -> str:
    """Return lines over a board, every `down` rows and `across` columns."""
    drawn = "".join(f"M0 {UNIT * y}H{UNIT * width}" for y in range(0, height + 1, down))
    drawn += "".join(f"M{UNIT * x} 0V{UNIT * height}" for x in range(0, width + 1, across))
    return f'<path class="{kind}" d="{drawn}"/>'
