# SPDX-License-Identifier: Apache-2.0
from collections import deque

import numpy as np
import pytest

from input_pipeline.puzzles import maze


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


@pytest.mark.parametrize("side", [3, 4, 9, 30])
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
