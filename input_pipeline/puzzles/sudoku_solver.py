# SPDX-License-Identifier: Apache-2.0
"""Solves many Sudokus at once: the candidates of a cell are bits of a mask, and each step applies to all boards.

A unit is a row, a column or a box. Two rules are applied until nothing changes. A known digit is removed from the other
cells of its units; a digit that fits only one cell of a unit is put there. If a board is still not solved, the solver
tries each candidate of the cell that has the fewest.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # side of a board: rows and columns of a box


class Layout(NamedTuple):
    """The cells of each unit; cells are numbered row by row."""

    cells: np.ndarray  # int [units, side], the cells of each row, column and box
    units: np.ndarray  # int [cells, 3], the row, column and box of each cell


class Verdict(NamedTuple):
    """The result of a search."""

    solutions: np.ndarray  # int [boards], the number found, at least `most` if there are as many
    guesses: np.ndarray  # int [boards], how often the rules alone did not solve the board


@cache
def layout(side: int) -> Layout:
    """Return the units of boards of a side."""
    height, width = BOXES[side]
    numbers = np.arange(side * side).reshape(side, side)
    boxes = numbers.reshape(side // height, height, side // width, width).swapaxes(1, 2).reshape(side, side)
    cells = np.concatenate([numbers, numbers.T, boxes])
    units = np.nonzero(cells.ravel() == np.arange(side * side)[:, None])[1].reshape(-1, 3) // side
    return Layout(cells, units)


def candidates_of(boards: np.ndarray) -> np.ndarray:
    """Return the candidates of each cell of boards [N, side, side]: uint16 [cells, N], with bit d - 1 for digit d."""
    side = boards.shape[-1]
    digits = boards.reshape(-1, side * side).T.astype(np.uint16)
    return np.where(digits > 0, np.uint16(1) << (digits - np.uint16(digits > 0)), np.uint16((1 << side) - 1))


def propagate(candidates: np.ndarray) -> None:
    """Apply the rules in place until nothing changes; a board without a solution loses all candidates."""
    active = np.arange(candidates.shape[1])
    while active.size:
        before = candidates[:, active]
        after = _applied(before)
        candidates[:, active] = after
        active = active[(after != before).any(axis=0)]


def search(candidates: np.ndarray, most: int) -> Verdict:
    """Search the solutions of boards, uint16 [cells, N], until `most` of each are found or there are no others."""
    owners, number = np.arange(candidates.shape[1]), candidates.shape[1]
    solutions, guesses = np.zeros(number, np.int64), np.zeros(number, np.int64)
    candidates = candidates.copy()
    while owners.size:
        propagate(candidates)
        counts = np.bitwise_count(candidates)
        solutions += np.bincount(owners[(counts == 1).all(axis=0)], minlength=number)
        stuck = (counts > 1).any(axis=0) & (solutions[owners] < most)
        candidates, owners = candidates[:, stuck], owners[stuck]
        guesses += np.bincount(owners, minlength=number)
        candidates, owners = _branched(candidates, owners)
    return Verdict(solutions, guesses)


def fewest(counts: np.ndarray, ties: np.ndarray | float = 0.0) -> np.ndarray:
    """Return the cell of each board with the fewest candidates, among cells with at least two: int [N].

    `counts` are numbers of candidates, [cells, N]. Among equal ones the smallest of `ties`, values below 1, decides.
    """
    return np.where(counts > 1, counts + ties, np.inf).argmin(axis=0)


def _applied(candidates: np.ndarray) -> np.ndarray:
    """Return the candidates after applying each rule once."""
    cells, units = layout(int(candidates.shape[0] ** 0.5))
    known = (candidates & (candidates - np.uint16(1))) == 0
    taken, taken_twice = _once_and_twice(np.where(known, candidates, np.uint16(0))[cells])
    seen, seen_twice = _once_and_twice(candidates[cells])
    excluded = np.where(known, _any(taken_twice, units), _any(taken, units))
    required = candidates & _any(seen & ~seen_twice, units)
    left = candidates & ~excluded & np.where(required == 0, ~required, required)
    full = np.uint16((1 << cells.shape[1]) - 1)
    several = (required & (required - np.uint16(1))) != 0
    lost = (left == 0).any(axis=0) | several.any(axis=0) | (seen != full).any(axis=0)
    left[:, lost] = 0
    return left


def _once_and_twice(in_units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bits that some cell of a unit has, and those that at least two have, of uint16 [units, side, N]."""
    once, twice = np.zeros_like(in_units[:, 0]), np.zeros_like(in_units[:, 0])
    for place in range(in_units.shape[1]):
        twice |= once & in_units[:, place]
        once |= in_units[:, place]
    return once, twice


def _any(of_units: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Return the bits that some unit of each cell has: uint16 [cells, N]."""
    return of_units[units[:, 0]] | of_units[units[:, 1]] | of_units[units[:, 2]]


def _branched(candidates: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a copy of each board for each candidate of its cell with the fewest, and the owner of each copy."""
    cell = fewest(np.bitwise_count(candidates))
    here = candidates[cell, np.arange(len(owners))]
    bits = np.uint16(1) << np.arange(16, dtype=np.uint16)
    board, bit = np.nonzero((here[:, None] & bits) != 0)
    branches = candidates[:, board]
    branches[cell[board], np.arange(len(board))] = bits[bit]
    return branches, owners[board]
