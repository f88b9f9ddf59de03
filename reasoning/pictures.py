# SPDX-License-Identifier: Apache-2.0
"""A page that shows what a recursive model answered to a puzzle at each step of supervision."""

import html
from collections.abc import Iterable

import numpy as np

from input_pipeline.puzzles.maze import CHARACTERS, GOAL, START
from reasoning.puzzle_file import BOXES, Puzzle, board_text, digit

UNIT = 20  # of an SVG, a cell
WIDTHS = {"sudoku": 26, "maze": 10}  # pixels a cell, at most
CSS = """
:root { color-scheme: light dark; --ink: #23272e; --soft: #646b75; --rule: #c3c8cf; --paper: #fff; --panel: #f6f7f9;
  --cell: #fff; --wall: #3c434d; --path: #6ea8dc; --start: #2e9e5b; --goal: #c2571a; --changed: #ffe08a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e6ea; --soft: #9aa2ad; --rule: #4a515c; --paper: #16191e;
  --panel: #1e2228; --cell: #262b32; --wall: #8b95a3; --path: #2f6ea8; --start: #3fb872; --goal: #e07b3c;
  --changed: #6b5714; } }
body { margin: 0 auto; max-width: 1160px; padding: 24px 16px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; } h1 { font-size: 25px; font-weight: 600; margin: 0 0 8px; }
p { color: var(--soft); margin: 4px 0; max-width: 85ch; }
.boards { display: flex; flex-wrap: wrap; gap: 14px; align-items: flex-start; }
figure { margin: 0; padding: 10px; background: var(--panel); border-radius: 6px; max-width: 340px; }
figcaption { font-size: 13px; margin-top: 6px; font-variant-numeric: tabular-nums; }
figcaption span { color: var(--soft); } .bar { height: 4px; margin-top: 4px; background: var(--rule); }
.bar i { display: block; height: 4px; background: var(--ink); }
svg { display: block; max-width: 100%; height: auto; } text { font: 13px system-ui, sans-serif; fill: var(--ink);
  text-anchor: middle; } .given { font-weight: 700; } .mark { font-weight: 700; fill: #fff; }
.cell { fill: var(--cell); } .wall { fill: var(--wall); } .path { fill: var(--path); } .start { fill: var(--start); }
.goal { fill: var(--goal); } .none { fill: var(--panel); } .changed { fill: var(--changed); }
.thin, .thick, .ring { fill: none; stroke: var(--rule); } .thick { stroke: var(--ink); stroke-width: 2; }
.ring { stroke: var(--changed); stroke-width: 3; }
"""


def page(puzzle: Puzzle, answers: Iterable[tuple[np.ndarray, float]], title: str) -> str:
    """Return an HTML document that needs no other file, network or script; the same bytes for the same boards.

    Args:
      answers: tokens, as many as the puzzle has, and the probability of halting after each step.
    """
    head = '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    head += f"<title>{html.escape(title)}</title>\n<style>{CSS}</style>"
    said = "What the model answers after each step of supervision. Yellow: changed since the step before. The bar is "
    said += "the probability of halting there."
    shown, before = [_figure(puzzle, puzzle.tokens, puzzle.tokens, "puzzle")], None
    for number, (cells, halt) in enumerate(answers, 1):
        board = np.reshape(cells, puzzle.tokens.shape)
        changes = "" if before is None else f" · {int((board != before).sum())} changed"
        caption = f"<b>step {number}</b> <span>halt {halt:.3f}{changes}</span>"
        caption += f'<div class="bar"><i style="width:{100 * min(1.0, max(0.0, halt)):.1f}%"></i></div>'
        shown.append(_figure(puzzle, board, board if before is None else before, caption))
        before = board
    boards = "\n".join(shown)
    body = f'<h1>{html.escape(title)}</h1>\n<p>{said}</p>\n<div class="boards">\n{boards}\n</div>'
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _figure(puzzle: Puzzle, cells: np.ndarray, before: np.ndarray, caption: str) -> str:
    height, width = cells.shape
    drawn = {"sudoku": _sudoku, "maze": _maze}[puzzle.kind](cells, puzzle.tokens, cells != before)
    box = f"-1 -1 {UNIT * width + 2} {UNIT * height + 2}"
    pixels = min(WIDTHS[puzzle.kind] * width, 340)
    label = html.escape(board_text(puzzle.kind, cells), quote=True).replace("\n", "&#10;")
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" width="{pixels}" viewBox="{box}">'
    return f"<figure>{svg}{drawn}</svg><figcaption>{caption}</figcaption></figure>"


def _sudoku(cells: np.ndarray, given: np.ndarray, changed: np.ndarray) -> str:
    side = len(cells)
    drawn = _filled("cell", np.ones_like(cells, bool)) + _filled("changed", changed)
    for y, x in np.argwhere(cells != 1).tolist():
        drawn += _letter(' class="given"' if given[y, x] > 1 else "", y, x, digit(cells[y, x], side))
    return drawn + _lines("thin", side, 1, 1) + _lines("thick", side, *BOXES[side])


def _maze(cells: np.ndarray, given: np.ndarray, changed: np.ndarray) -> str:
    height, width = cells.shape
    drawn = _filled("none", (cells < 1) | (cells > len(CHARACTERS)))
    for token, kind in enumerate(("wall", "cell", "start", "goal", "path"), 1):
        drawn += _filled(kind, cells == token)
    rings = "".join(f"M{UNIT * x} {UNIT * y}m1.5 1.5h17v17h-17z" for y, x in np.argwhere(changed).tolist())
    drawn += f'<path class="ring" d="{rings}"/>' if rings else ""
    for y, x in np.argwhere((cells == START) | (cells == GOAL)).tolist():
        drawn += _letter(' class="mark"', y, x, CHARACTERS[cells[y, x] - 1])
    return drawn + f'<path class="thin" d="M0 0H{UNIT * width}V{UNIT * height}H0z"/>'


def _letter(attributes: str, y: int, x: int, letter: str) -> str:
    return f'<text{attributes} x="{UNIT * x + 10}" y="{UNIT * y + 14.5}">{letter}</text>'


def _filled(kind: str, where: np.ndarray) -> str:
    """Return one path over the cells of a mask, a rectangle for each run of a row."""
    drawn = ""
    for y, row in enumerate(where.astype(np.int8)):
        for start, end in np.flatnonzero(np.diff(row, prepend=0, append=0)).reshape(-1, 2).tolist():
            drawn += f"M{UNIT * start} {UNIT * y}h{UNIT * (end - start)}v{UNIT}h-{UNIT * (end - start)}z"
    return f'<path class="{kind}" d="{drawn}"/>' if drawn else ""


def _lines(kind: str, side: int, down: int, across: int) -> str:
    """Return lines over a board, each so many rows and columns."""
    drawn = "".join(f"M0 {UNIT * y}H{UNIT * side}" for y in range(0, side + 1, down))
    drawn += "".join(f"M{UNIT * x} 0V{UNIT * side}" for x in range(0, side + 1, across))
    return f'<path class="{kind}" d="{drawn}"/>'
