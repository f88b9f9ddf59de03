# SPDX-License-Identifier: Apache-2.0
"""Each way of choosing prefers what it says, and the rules hold of right answers alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.base import get_config
from input_pipeline.puzzles import maze, sudoku_generator
from puzzles import choosing

#                answers of five trajectories, of two cells
ANSWERS = jnp.array([[1, 2], [3, 4], [3, 4], [5, 6], [1, 2]])
HALTS = jnp.array([-2.0, -1.0, -1.5, 3.0, 2.0])
CHANGES = jnp.array([0.5, 0.4, 0.1, 0.3, 0.2])


@pytest.mark.parametrize(("how", "place"), [("q_head", 3), ("vote", 0), ("weighted_vote", 0), ("convergence", 2)])
def test_a_choice_takes_the_answer_that_it_says(how, place):
    """Both pairs have two votes, the mean probability decides; a sure pair outweighs a surer single one."""
    assert choosing.chosen(how, ANSWERS, HALTS, CHANGES) == place
    both = choosing.chosen(how, jnp.stack([ANSWERS] * 2), jnp.stack([HALTS] * 2), jnp.stack([CHANGES] * 2))
    assert both.tolist() == [place] * 2


def test_a_vote_is_by_number_unless_weighted():
    halts = jnp.array([-9.0, -9.0, -9.0, 3.0, -9.0])
    answers = jnp.array([[1, 2], [1, 2], [3, 4], [5, 6], [3, 5]])
    assert choosing.chosen("vote", answers, halts, CHANGES) == 0
    assert choosing.chosen("weighted_vote", answers, halts, CHANGES) == 3


@pytest.mark.parametrize("side", [4, 6, 9])
def test_a_sudoku_is_solved_by_its_solution_alone(side):
    drawn = sudoku_generator.draw(np.random.default_rng(0), 4, side, 0)
    solves = jax.jit(choosing.is_solved_sudoku)
    assert solves(drawn.questions, drawn.answers).all()
    assert not solves(drawn.questions, np.roll(drawn.answers, 1, axis=0)).any(), "another board's answer"
    assert not solves(drawn.questions, drawn.questions).any()
    wrong = drawn.answers.copy()
    wrong[:, 0] = 1 + wrong[:, 0] % (side + 1)
    assert not solves(drawn.questions, wrong).any()


@pytest.mark.parametrize("side", [5, 10])
def test_a_maze_is_solved_by_its_path_alone(side):
    drawn = maze.draw(np.random.default_rng(0), 20, side)
    solves = jax.jit(choosing.is_solved_maze)
    assert solves(drawn.questions, drawn.answers).all()
    unsolved = drawn.ratings > 1
    assert not solves(drawn.questions, drawn.questions)[unsolved].any(), "without a path"
    for answer, question in zip(drawn.answers, drawn.questions, strict=True):
        for place in np.flatnonzero(answer == maze.FLOOR):
            longer = answer.copy()
            longer[place] = maze.PATH
            assert not solves(question, longer)
        for place in np.flatnonzero(answer == maze.PATH)[:3]:
            shorter = answer.copy()
            shorter[place] = maze.FLOOR
            assert not solves(question, shorter)


def test_a_maze_of_a_file_may_have_several_right_paths():
    config = get_config()
    config.data.source = "maze"
    assert choosing.checker_of(config) is choosing.is_solved_maze
    config.data.path = "mazes"
    assert choosing.checker_of(config) is None
