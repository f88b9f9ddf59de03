# SPDX-License-Identifier: Apache-2.0
"""The eight rotations and reflections of a grid, numbered as in the names of ARC versions."""

import numpy as np

INVERSES = (0, 3, 2, 1, 4, 5, 6, 7)


def dihedral(grid: np.ndarray, number: int) -> np.ndarray:
    """Return a grid [..., rows, columns] rotated or reflected.

    Args:
        number: 0 the grid itself; 1, 2, 3 rotated counter-clockwise by that many quarter turns; 4 left and right
            swapped; 5 top and bottom swapped; 6 transposed; 7 rotated by one quarter turn, then left and right swapped.
    """
    if number < 4:
        return np.rot90(grid, number, axes=(-2, -1))
    if number == 6:
        return np.swapaxes(grid, -2, -1)
    return np.flip(np.rot90(grid, axes=(-2, -1)) if number == 7 else grid, axis=-2 if number == 5 else -1)


def undo(grid: np.ndarray, number: int) -> np.ndarray:
    """Return the grid that `dihedral(., number)` turned into this one."""
    return dihedral(grid, INVERSES[number])
