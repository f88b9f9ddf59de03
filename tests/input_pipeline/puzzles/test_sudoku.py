# SPDX-License-Identifier: Apache-2.0
"""Sudokus: augmented ones stay valid, made ones have one solution, and what they have in common is just that."""

import itertools

import numpy as np
import pytest

from input_pipeline.puzzles import sudoku, sudoku_generator
from input_pipeline.puzzles.sudoku_forms import forms
from input_pipeline.puzzles.sudoku_solver import BOXES, candidates_of, search

SIDES = sorted(BOXES)


@pytest.fixture(scope="module")
def made():
    """Puzzles of each side, as boards of digits: (questions, answers, what was drawn)."""

    def draw(side, number=20, clues=0):
        drawn = sudoku_generator.draw(np.random.default_rng(side), number, side, clues)
        return *(tokens.reshape(-1, side, side) - 1 for tokens in drawn[:2]), drawn

    found = {side: draw(side) for side in SIDES}
    return lambda side, **changes: draw(side, **changes) if changes else found[side]


def solutions(board: np.ndarray) -> int:
    """Count the solutions of a board by trying every digit, cell after cell."""
    side = len(board)
    height, width = BOXES[side]
    empty = np.argwhere(board == 0)
    if not len(empty):
        return 1
    row, column = empty[0]
    top, left = row // height * height, column // width * width
    used = {*board[row], *board[:, column], *board[top : top + height, left : left + width].ravel()}
    found = 0
    for digit in set(range(1, side + 1)) - used:
        board[row, column] = digit
        found += solutions(board)
        board[row, column] = 0
    return found


@pytest.mark.parametrize("side", SIDES)
def test_made_puzzles_have_one_solution_and_no_clue_too_many(made, side):
    questions, answers, drawn = made(side)
    assert sudoku.is_solved(answers).all() and len(questions) == 20
    assert np.array_equal(np.where(questions > 0, answers, 0), questions)
    assert (search(candidates_of(questions), most=2).solutions == 1).all()
    assert drawn.questions.min() == 1 and drawn.answers.max() == side + 1
    for board in questions[:3]:
        for cell in np.argwhere(board > 0):
            fewer = board.copy()
            fewer[tuple(cell)] = 0
            assert search(candidates_of(fewer[None]), most=2).solutions[0] > 1


@pytest.mark.parametrize("side", [4, 6])
def test_the_solver_counts_as_trying_everything_does(made, side):
    questions = made(side)[0][:8]
    generator = np.random.default_rng(0)
    fewer = np.where(generator.random(questions.shape) < 0.15, 0, questions)
    counts = [solutions(board.copy()) for board in fewer]
    assert max(counts) > 1
    assert search(candidates_of(fewer), most=10**6).solutions.tolist() == counts
    wrong = questions[:1].copy()
    wrong[0, 0, :2] = 1
    assert search(candidates_of(wrong), most=2).solutions[0] == 0


def test_so_many_clues(made):
    questions, _, _ = made(4, number=40, clues=7)
    assert len(questions) > 20 and ((questions > 0).sum(axis=(1, 2)) == 7).all()


def test_ratings_are_guesses(made):
    ratings = made(9)[2].ratings
    assert ratings.min() == 0 and ratings.max() > 2


@pytest.mark.parametrize("side", SIDES)
def test_augmentations_keep_boards_valid_clues_in_place_and_forms_the_same(made, side):
    questions, answers, _ = made(side)
    for number, (question, answer) in enumerate(zip(questions[:5], answers, strict=False)):
        draws = sudoku.draw(np.random.default_rng(number), 30, side)
        boards, solved = (sudoku.augment(board, *draws) for board in (question, answer))
        assert sudoku.is_solved(solved).all()
        assert np.array_equal(np.where(boards > 0, solved, 0), boards)
        assert ((boards > 0).sum(axis=(1, 2)) == (question > 0).sum()).all()
        assert len({board.tobytes() for board in boards}) > 15
        assert set(forms(boards, solved)) == set(forms(question[None], answer[None]))


def test_draws_are_uniform_over_orders_of_lines():
    draws = sudoku.draw(np.random.default_rng(0), 4000, 4)
    orders, counts = np.unique(draws.rows, axis=0, return_counts=True)
    assert len(orders) == 8 and counts.min() > 400
    assert 0.45 < draws.transpose.mean() < 0.55
    assert len(np.unique(draws.digits, axis=0)) == 24 and not draws.digits[:, 0].any()
    assert not sudoku.draw(np.random.default_rng(0), 100, 6).transpose.any()


def test_there_are_36_forms_of_minimal_puzzles_of_side_4(made):
    """A number known from enumerating them all."""
    questions, answers, drawn = made(4, number=1500)
    assert len(set(drawn.forms)) == 36
    assert forms(questions, answers) == drawn.forms


def test_the_form_of_side_4_is_the_least_of_all_versions(made):
    questions, _, drawn = made(4)
    lines = [
        [*first, *second] if order else [*second, *first]
        for first, second in itertools.product([(0, 1), (1, 0)], [(2, 3), (3, 2)])
        for order in (True, False)
    ]
    for question, form in zip(questions[:4], drawn.forms, strict=False):
        versions = [
            renamed(board[rows][:, columns].ravel().tolist())
            for board in (question, question.T)
            for rows, columns in itertools.product(lines, lines)
        ]
        least = min(versions, key=lambda version: ([digit > 0 for digit in version], version))
        assert form == bytes(least)


def renamed(digits: list[int]) -> list[int]:
    names = {0: 0}
    return [names.setdefault(digit, len(names)) for digit in digits]


def test_other_puzzles_of_side_9_have_other_forms(made):
    questions, answers, drawn = made(9)
    assert len(set(drawn.forms)) == len(questions)
    fewer = questions.copy()
    fewer[np.arange(20), *np.array([np.argwhere(board > 0)[0] for board in questions]).T] = 0
    assert not set(forms(fewer, answers)) & set(drawn.forms)
