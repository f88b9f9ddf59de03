# SPDX-License-Identifier: Apache-2.0
"""Invariants that a Sudoku shares with all its augmentations, so that no augmentation of a training puzzle is held out.

For sides 4 and 6 the invariant is the least version of the puzzle. Its versions are all permutations of rows, columns,
bands and stacks (and the transposes, if boxes are squares), each with digits renamed in order of first appearance. The
least version has the first clues, and among equals the first digits. Two puzzles share it if and only if one is an
augmentation of the other.

Side 9 has 3.4 million versions, so the invariant is a hash that no augmentation changes. Augmentations of each other
share it. Other puzzles hardly ever do; one that does is dropped needlessly.
"""

import itertools
from functools import cache

import numpy as np

from input_pipeline.order import mix
from input_pipeline.puzzles.sudoku_solver import BOXES, layout

ROUNDS = 4  # of hashing; after these, every cell's hash depends on all others
LARGEST_EXACT = 6  # side


def forms(questions: np.ndarray, answers: np.ndarray) -> list[bytes]:
    """Return the invariant of each puzzle, given puzzles [N, side, side] and their solutions."""
    if questions.shape[-1] <= LARGEST_EXACT:
        return [_least(board).tobytes() for board in questions]
    return [key.tobytes() for key in _invariant(questions, answers)]


def _least(board: np.ndarray) -> np.ndarray:
    """Return the least version of a board: uint8 [cells]."""
    moves, places = _moves(board.shape[-1])
    clues = (board.ravel() > 0) @ places  # for each version, its clues as the bits of a number
    versions = board.ravel()[moves[clues == clues.min()]]
    renamed = np.stack([_in_order_of_appearance(version) for version in versions])
    return renamed[np.lexsort(renamed.T[::-1])[0]].astype(np.uint8)


def _in_order_of_appearance(version: np.ndarray) -> np.ndarray:
    digits, firsts = np.unique(version[version > 0], return_index=True)
    names = np.zeros(version.max(initial=0) + 1, np.int64)
    names[digits[firsts.argsort()]] = np.arange(1, len(digits) + 1)
    return names[version]


@cache
def _moves(side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (the old cell at each place of every version [versions, cells], the bit of each old cell's new place).

    The second is int64 [cells, versions]; earlier places have higher bits.
    """
    height, width = BOXES[side]
    numbers = np.arange(side * side).reshape(side, side)
    bases = (numbers, numbers.T) if height == width else (numbers,)
    rows, columns = _orders(side // height, height), _orders(side // width, width)
    moves = np.array([base[row][:, column].ravel() for base in bases for row in rows for column in columns])
    places = np.empty_like(moves)
    np.put_along_axis(places, moves, np.int64(1) << np.arange(side * side)[::-1], axis=1)
    return moves, places.T.copy()


def _orders(bands: int, size: int) -> list[np.ndarray]:
    """Return every order of lines in which the lines of a band stay together."""
    within = [list(itertools.permutations(range(band * size, band * size + size))) for band in range(bands)]
    return [
        np.concatenate([lines[band] for band in order])
        for order in itertools.permutations(range(bands))
        for lines in itertools.product(*within)
    ]


def _invariant(questions: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Return a hash of clues and solution that no augmentation changes: uint64 [N].

    A cell's hash begins with whether it is a clue. Each round mixes in sums over its row and column (added together,
    because transposing swaps them), its box, its band and stack, and the cells of its digit.
    """
    side = questions.shape[-1]
    height, width = BOXES[side]
    _, units = layout(side)
    row, column, box = units.T
    column, box = column - side, box - 2 * side
    digit = answers.reshape(-1, side * side) - 1
    hashes = mix((questions > 0).reshape(-1, side * side).astype(np.uint64))
    for _ in range(ROUNDS):
        lines = _sums(hashes, row, side) + _sums(hashes, column, side)
        bands = _sums(hashes, row // height, side // height) + _sums(hashes, column // width, side // width)
        parts = (hashes, lines, _sums(hashes, box, side), bands, _sums(hashes, digit, side))
        hashes = sum(mix(part + np.uint64(place)) for place, part in enumerate(parts))
        hashes = mix(hashes)
    return mix(hashes.sum(axis=1))


def _sums(hashes: np.ndarray, groups: np.ndarray, number: int) -> np.ndarray:
    """Return, for each cell, the mixed sum of the hashes in its group: uint64 [N, cells]."""
    members = groups[..., None, :] == np.arange(number)[:, None]
    totals = mix(np.where(members, hashes[:, None, :], np.uint64(0)).sum(axis=2))
    return np.take_along_axis(totals, np.broadcast_to(groups, hashes.shape), axis=1)
