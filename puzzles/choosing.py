# SPDX-License-Identifier: Apache-2.0
"""Ways to choose one of several answers to a puzzle without its label, and the rules that a right answer keeps.

`CHOICES` has the ways that `inference.choice` names: functions from the answers of J trajectories to scores; the answer
with the highest score is chosen.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from input_pipeline.puzzles import maze
from input_pipeline.puzzles.sudoku_solver import layout

EMPTY = 1  # token of a Sudoku
Checker = Callable[[jax.Array, jax.Array], jax.Array]  # (givens [..., S], answers [..., S]) -> bool [...]


def q_head(answers: jax.Array, halts: jax.Array, changes: jax.Array) -> jax.Array:
    """Return the halt logits: the answer that the model holds for finished (arXiv:2605.19943)."""
    return halts


def vote(answers: jax.Array, halts: jax.Array, changes: jax.Array) -> jax.Array:
    """Return how many trajectories have the same answer; the mean probability of halting decides ties."""
    same = _same(answers)
    count = same.sum(axis=-1)
    return count + 0.5 * _times(same, jax.nn.sigmoid(halts)) / count


def weighted_vote(answers: jax.Array, halts: jax.Array, changes: jax.Array) -> jax.Array:
    """Return the sum of the probabilities of halting of all trajectories with the same answer."""
    return _times(_same(answers), jax.nn.sigmoid(halts))


def convergence(answers: jax.Array, halts: jax.Array, changes: jax.Array) -> jax.Array:
    """Return minus the change of the last step: the answer nearest to a fixed point (arXiv:2605.21488)."""
    return -changes


CHOICES = {function.__name__: function for function in (q_head, vote, weighted_vote, convergence)}


def chosen(how: str, answers: jax.Array, halts: jax.Array, changes: jax.Array) -> jax.Array:
    """Return the index of the trajectory that CHOICES[how] prefers, int32 [...]; of equals the first.

    Answers are tokens [..., J, S], halts and changes float32 [..., J], as in objectives/breadth.py.
    """
    return CHOICES[how](answers, halts, changes).argmax(axis=-1)


def checker_of(config) -> Checker | None:
    """Return the check of the rules of a run's puzzles; None if rules alone do not tell a right answer.

    They do for Sudokus, and for mazes made here, in which only one path leads from start to goal.
    """
    data = config.data
    if data.source == "sudoku":
        return is_solved_sudoku
    return is_solved_maze if data.source == "maze" and not data.path else None


def is_solved_sudoku(givens: jax.Array, answers: jax.Array) -> jax.Array:
    """Return whether answers keep the givens and have every digit once in each row, column and box: bool [...].

    Givens and answers are tokens [..., side * side].
    """
    side = round(answers.shape[-1] ** 0.5)
    keeps = ((givens == EMPTY) | (givens == answers)).all(axis=-1)
    units = jnp.sort(answers[..., layout(side).cells], axis=-1)
    return keeps & (units == EMPTY + 1 + jnp.arange(side)).all(axis=(-1, -2))


def is_solved_maze(givens: jax.Array, answers: jax.Array) -> jax.Array:
    """Return whether answers keep the maze and mark a path from start to goal: bool [...].

    Each cell of the path has two neighbours on it, start and goal have one each. In a maze without loops, only the path
    from start to goal meets this rule. Givens and answers are tokens [..., side * side].
    """
    side = round(answers.shape[-1] ** 0.5)
    is_path = answers == maze.PATH
    keeps = (jnp.where(is_path, maze.FLOOR, answers) == givens).all(axis=-1)
    on = (is_path | (answers == maze.START) | (answers == maze.GOAL)).reshape(*answers.shape[:-1], side, side)
    edges = [(0, 0)] * (on.ndim - 2)
    padded = jnp.pad(on, [*edges, (1, 1), (1, 1)]).astype(jnp.int32)
    places = [(1 + down, 1 + right) for down, right in maze.STEPS]
    near = sum(padded[..., row : row + side, column : column + side] for row, column in places)
    wanted = jnp.where(is_path, 2, 1).reshape(on.shape)
    return keeps & (~on | (near == wanted)).all(axis=(-1, -2))


def _same(answers: jax.Array) -> jax.Array:
    """Return which trajectories have the same answer: bool [..., J, J]."""
    return (answers[..., :, None, :] == answers[..., None, :, :]).all(axis=-1)


def _times(same: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.where(same, weights[..., None, :], 0.0).sum(axis=-1)
