# SPDX-License-Identifier: Apache-2.0
"""Augments Sudokus, and checks whether boards are solved.

A board is an array [side, side] of digits 1 to side; 0 is an empty cell. A token is the digit + 1; token 0 is padding.
Sides are 4, 6 and 9, with boxes of 2 x 2, 2 x 3 (rows x columns) and 3 x 3.
"""

from typing import NamedTuple

import numpy as np

from input_pipeline.puzzles.sudoku_solver import BOXES, layout


class Draws(NamedTuple):
    """Random augmentations, applied in this order."""

    transpose: np.ndarray  # bool [N], rows become columns
    rows: np.ndarray  # int [N, side], the old index of each row
    columns: np.ndarray  # int [N, side], the old index of each column
    digits: np.ndarray  # int [N, side + 1], the new digit for each digit; 0 (empty) stays 0


def augment(board: np.ndarray, transpose, rows: np.ndarray, columns: np.ndarray, digits: np.ndarray) -> np.ndarray:
    """Return a board [side, side] augmented: cell (i, j) is cell (rows[i], columns[j]) of the (transposed) board.

    The draws may have leading dimensions, as in `Draws`; the result then has them too.
    """
    turned = np.where(np.asarray(transpose)[..., None, None], board.T, board)
    moved = np.take_along_axis(np.take_along_axis(turned, rows[..., :, None], -2), columns[..., None, :], -1)
    flat = moved.reshape(*moved.shape[:-2], board.size)
    return np.take_along_axis(digits, flat, -1).reshape(moved.shape)


def draw(generator: np.random.Generator, number: int, side: int) -> Draws:
    """Draw augmentations uniformly; a board whose boxes are not squares is never transposed."""
    height, width = BOXES[side]
    transpose = generator.random(number) < 0.5 if height == width else np.zeros(number, bool)
    rows = _lines(generator, number, side // height, height)
    columns = _lines(generator, number, side // width, width)
    digits = 1 + generator.random((number, side)).argsort(axis=1)
    return Draws(transpose, rows, columns, np.concatenate([np.zeros_like(digits[:, :1]), digits], axis=1))


def is_solved(boards: np.ndarray) -> np.ndarray:
    """Return whether each of boards [N, side, side] has every digit once in each row, column and box: bool [N]."""
    side = boards.shape[-1]
    in_units = np.sort(boards.reshape(-1, side * side)[:, layout(side).cells], axis=-1)
    return (in_units == np.arange(1, side + 1)).all(axis=(1, 2))


def _lines(generator: np.random.Generator, number: int, bands: int, size: int) -> np.ndarray:
    """Draw orders of lines in which the lines of a band stay together: int [number, bands * size]."""
    order = generator.random((number, bands)).argsort(axis=1)
    within = generator.random((number, bands, size)).argsort(axis=2)
    return (order[:, :, None] * size + within).reshape(number, bands * size)
