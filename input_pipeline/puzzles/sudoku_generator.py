# SPDX-License-Identifier: Apache-2.0
"""Generates random Sudokus with one solution each, and rates their difficulty."""

import numpy as np

from input_pipeline.puzzles.drawn import Drawn
from input_pipeline.puzzles.sudoku_forms import forms
from input_pipeline.puzzles.sudoku_solver import candidates_of, fewest, propagate, search

FEWEST_CLUES = {4: 4, 6: 8, 9: 17}  # {side: fewest clues of a board with one solution}
EASY_CLUES = {4: 5, 6: 11, 9: 25}  # {side: clues to which most boards can be reduced}


def draw(generator: np.random.Generator, number: int, side: int, clues: int) -> Drawn:
    """Make puzzles; fewer than `number` if some cannot be reduced to `clues` clues.

    With `clues` 0, clues are removed until another removal would give a second solution. Questions and answers are
    tokens [.., side * side]; a rating is the number of guesses that a solver with two simple rules needs to show that
    there is no other solution.
    """
    answers = solved(generator, number, side)
    questions = dug(generator, answers, clues)
    if clues:
        met = (questions > 0).sum(axis=(1, 2)) == clues
        questions, answers = questions[met], answers[met]
    ratings = search(candidates_of(questions), most=2).guesses
    keys = forms(questions, answers)
    flat = (len(questions), side * side)
    return Drawn((questions + 1).reshape(flat), (answers + 1).reshape(flat), ratings, keys)


def solved(generator: np.random.Generator, number: int, side: int) -> np.ndarray:
    """Return random full boards: int [number, side, side]. A board whose guess has no solution is started again."""
    empty = candidates_of(np.zeros((1, side, side), np.int64))
    candidates, boards = np.repeat(empty, number, axis=1), np.arange(number)
    while boards.size:
        part = candidates[:, boards]
        propagate(part)
        part[:, ~part.any(axis=0)] = empty
        counts = np.bitwise_count(part)
        cell = fewest(counts, ties=generator.random(part.shape))
        choice = _any_bit(generator, part[cell, np.arange(len(boards))], side)
        stuck = (counts > 1).any(axis=0)
        part[cell[stuck], np.flatnonzero(stuck)] = choice[stuck]
        candidates[:, boards] = part
        boards = boards[stuck]
    return (1 + np.log2(candidates).astype(np.int64)).T.reshape(number, side, side)


def dug(generator: np.random.Generator, answers: np.ndarray, clues: int) -> np.ndarray:
    """Return boards [N, side, side] with removable clues removed, cell after cell in random order, down to `clues`.

    A clue is removable if no other digit in its cell has a solution.
    """
    side = answers.shape[-1]
    questions = answers.reshape(-1, side * side).copy()
    order = generator.random(questions.shape).argsort(axis=1)
    for cells in order.T:
        boards = np.flatnonzero((questions > 0).sum(axis=1) > clues)
        cells = cells[boards]
        without = questions[boards]
        without[np.arange(len(boards)), cells] = 0
        candidates = candidates_of(without.reshape(-1, side, side))
        digit = questions[boards, cells].astype(np.uint16)
        candidates[cells, np.arange(len(boards))] ^= np.uint16(1) << (digit - np.uint16(1))
        unique = search(candidates, most=1).solutions == 0
        questions[boards[unique], cells[unique]] = 0
    return questions.reshape(answers.shape)


def _any_bit(generator: np.random.Generator, masks: np.ndarray, side: int) -> np.ndarray:
    """Return a random bit of each mask: uint16 of the same shape."""
    bits = np.uint16(1) << np.arange(side, dtype=np.uint16)
    has = (masks[:, None] & bits) != 0
    return bits[np.where(has, generator.random(has.shape), -1.0).argmax(axis=1)]
