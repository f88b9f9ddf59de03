# SPDX-License-Identifier: Apache-2.0
"""ARC grids as tokens, and back: 0 padding, 1 border, 2 to 11 the colours, on a canvas of 30 x 30."""

import numpy as np

SIDE, FIRST_COLOUR = 30, 2
INVERSE = (0, 3, 2, 1, 4, 5, 6, 7)  # of each of the eight symmetries


def dihedral(grid: np.ndarray, which: int) -> np.ndarray:
    """Return the grid under a symmetry of the square; `which` as in names of versions, 0 to 7."""
    if which < 4:
        return np.rot90(grid, which)
    return (np.fliplr(grid), np.flipud(grid), grid.T, np.fliplr(np.rot90(grid)))[which - 4]


def crop(tokens: np.ndarray) -> np.ndarray:
    """Return, as uint8, the largest rectangle of colours alone at the top left of [900] tokens; may be 0 x 0."""
    canvas = np.asarray(tokens).reshape(SIDE, SIDE)
    coloured = (canvas >= FIRST_COLOUR) & (canvas < FIRST_COLOUR + 10)
    widths = np.minimum.accumulate(np.where(coloured.all(1), SIDE, coloured.argmin(1)))
    areas = widths * np.arange(1, SIDE + 1)
    height = int(areas.argmax()) + 1
    width = int(widths[height - 1])
    return (canvas[: height if width else 0, :width] - FIRST_COLOUR).astype(np.uint8)


def task_of(name: str) -> str:
    """Return the task of a version's name: "task" or "task|||t3|||0123456789"."""
    return name.split("|||")[0]


def undo(name: str, grid: np.ndarray) -> np.ndarray:
    """Return the grid as it was before the changes that its version's name tells."""
    if "|||" not in name:
        return grid
    _, symmetry, colours = name.split("|||")
    back = np.argsort([int(colour) for colour in colours]).astype(np.uint8)
    return back[dihedral(grid, INVERSE[int(symmetry[1:])])]
