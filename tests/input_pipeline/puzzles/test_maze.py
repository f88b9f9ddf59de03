# SPDX-License-Identifier: Apache-2.0
from collections import deque

import numpy as np
import pytest

from input_pipeline.puzzles import maze
from input_pipeline.puzzles.drawn import split


def ways(board: np.ndarray) -> tuple[int, int]:
    """Return (steps of the shortest way from start to goal, how many ways are that short)."""
    start, goal = (tuple(np.argwhere(board == token)[0]) for token in (maze.START, maze.GOAL))
    steps, counts, waiting = {start: 0}, {start: 1}, deque([start])
    while waiting:
        cell = waiting.popleft()
        for down, right in maze.STEPS:
            near = cell[0] + down, cell[1] + right
            if not all(0 <= place < len(board) for place in near) or board[near] == maze.WALL:
                continue
            if near not in steps:
                steps[near], counts[near] = steps[cell] + 1, 0
                waiting.append(near)
            if steps[near] == steps[cell] + 1:
                counts[near] += counts[cell]
    return steps[goal], counts[goal]


@pytest.mark.parametrize("side", [3, 4, 9, 30, 41])
def test_mazes_have_one_shortest_way_which_is_marked(side):
    drawn = maze.draw(np.random.default_rng(side), 10, side)
    for question, answer, rating in zip(drawn.questions, drawn.answers, drawn.ratings, strict=True):
        assert ways(question.reshape(side, side)) == (rating, 1)
        assert (answer == maze.PATH).sum() == rating - 1
        assert np.array_equal(np.where(answer == maze.PATH, maze.FLOOR, answer), question)
        only = np.where(answer == maze.FLOOR, maze.WALL, answer).reshape(side, side)
        assert ways(only) == (rating, 1)
        assert set(question) <= {maze.WALL, maze.FLOOR, maze.START, maze.GOAL}


def test_versions_are_eight_of_one_form():
    drawn = maze.draw(np.random.default_rng(0), 1, 9)
    versions = maze.versions(drawn.questions[0].reshape(9, 9))
    assert len({version.tobytes() for version in versions}) == 8
    assert np.array_equal(versions[0].ravel(), drawn.questions[0])
    for version in versions:
        assert min(other.tobytes() for other in maze.versions(version)) == drawn.forms[0]


def test_the_solver_finds_every_path_up_to_the_limit():
    """Around a pillar there are two, and none through a wall."""
    ring = np.array([[3, 2, 2], [2, 1, 2], [2, 2, 4]])
    assert [len(path) for path in maze.solutions(ring, 5)] == [5, 5]
    assert len(maze.solutions(ring, 1)) == 1
    assert maze.solutions(np.array([[3, 1, 4]])) == []
    assert maze.solutions(np.array([[4, 5, 3]])) == [[(0, 2), (0, 1), (0, 0)]]


def test_each_drawn_maze_has_one_solution_and_its_answer_marks_it():
    drawn = maze.draw(np.random.default_rng(1), 20, 10)
    for question, answer in zip(drawn.questions, drawn.answers, strict=True):
        (path,) = maze.solutions(question.reshape(10, 10))
        assert set(map(tuple, np.argwhere(answer.reshape(10, 10) == maze.PATH))) == set(path[1:-1])


def test_no_held_out_maze_is_a_rotation_or_reflection_of_a_training_maze():
    """By comparing all versions of each, on boards so small that they would meet by chance."""

    def draw(generator, number):
        return maze.draw(generator, number, 5)

    train, heldout = split(
        draw, train=60, heldout=30, least_rating=0, seed=0, name="mazes", settings="", announce=lambda line: None
    )
    trained = {version.tobytes() for board in train.questions for version in maze.versions(board.reshape(5, 5))}
    assert not any(board.tobytes() in trained for board in heldout.questions)
