# SPDX-License-Identifier: Apache-2.0
"""Solves one puzzle with a recursive model, one supervision step at a time, and checks the answer."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from configs.errors import ConfigError
from input_pipeline.puzzles import maze, sudoku
from objectives import breadth
from objectives.breadth import Breadth
from objectives.recursive import IGNORED, Recursive
from puzzles import choosing
from puzzles.choosing import EMPTY
from puzzles.puzzle_file import BOXES, Puzzle, board_text
from puzzles.voting import sigmoid
from reporting.display import counted, listed

BLANK = 0  # row of the puzzle table for puzzles without their own embedding
LISTED_CELLS = 12  # changed cells of a step that are listed, at most


class Answer(NamedTuple):
    """The model's answer after a supervision step."""

    cells: np.ndarray  # int32 [cells], the likeliest tokens
    halt: float  # probability of halting


def check_fits(puzzle: Puzzle, config) -> None:
    """Raise ConfigError for a puzzle of a kind or size that the recursive model of a run was not trained on."""
    source, model = config.data.source, config.model
    height, width = puzzle.tokens.shape
    what = f"a {puzzle.kind} of {height} x {width}"
    if source not in (puzzle.kind, "puzzles"):
        use = "use such a puzzle" if source in ("sudoku", "maze") else "a file has a Sudoku or a maze"
        raise ConfigError(f"the puzzle is {what}, but the model was trained on data.source={source}; {use}")
    is_other_shape = source == "maze" and height != width  # those of data.source=maze are square
    if puzzle.tokens.size != model.max_length or is_other_shape:
        raise ConfigError(
            f"the puzzle is {what}, but the model has model.max_length={model.max_length} cells; "
            "use a puzzle of the size that it was trained on"
        )
    vocab_size = height + 2 if puzzle.kind == "sudoku" else len(maze.CHARACTERS) + 1
    is_other_kind = vocab_size != model.vocab_size if source == "puzzles" else vocab_size > model.vocab_size
    if is_other_kind:
        raise ConfigError(
            f"the puzzle is {what}, which has {vocab_size} tokens, but the model has "
            f"model.vocab_size={model.vocab_size}; use a puzzle of the kind that it was trained on"
        )


def solve(
    objective: Recursive, graph: nnx.GraphDef, params: dict, tokens: np.ndarray, num_steps: int,
    is_wanted: Callable[[], bool] = lambda: True, seed: int = 0,
) -> list[Answer]:  # fmt: skip
    """Return the model's answer after each of `num_steps` supervision steps, without early halting.

    The objective is that of the run, whose mesh is in context. `tokens` are ints of any shape, one for each cell of the
    model. After each step `is_wanted` is asked; no further step is made if it returns false. `seed` is that of random
    initial latents, for a model that was trained with them.
    """
    objective, batch = objective.plain, _batch(tokens)
    carry = objective.init_carry(nnx.merge(graph, params), 1, jax.random.key(seed))
    answers = []
    for _ in range(num_steps):
        carry, predicted, halt_logits = _step(params, graph, objective, carry, batch)
        answers.append(Answer(np.asarray(predicted)[0], float(sigmoid(halt_logits)[0])))
        if not is_wanted():
            break
    return answers


class Chosen(NamedTuple):
    """The answer that was chosen among those of several trajectories."""

    answers: list[Answer]  # of the chosen trajectory, after each step
    trajectory: int  # its number, from 0
    last: np.ndarray  # int [J, cells], the last answers of all trajectories


def solve_broadly(
    objective: Recursive, graph: nnx.GraphDef, params: dict, tokens: np.ndarray, how: Breadth, choice: str, seed: int
) -> Chosen:
    """Return the answer that a way of choosing prefers after the last step, among several trajectories.

    `how` has the trajectories, steps and noise; `seed` is that of the noise. `choice` is a name in choosing.CHOICES.
    """
    draws = jax.random.key_data(jax.random.key(seed))[None]
    found = jax.device_get(_explored(params, graph, objective, _batch(tokens), draws, how))
    cells, halts, changes = (part[:, 0] for part in found)
    place = int(choosing.chosen(choice, cells[-1], halts[-1], changes[-1]))
    answers = [Answer(cells[n, place].astype(np.int32), float(sigmoid(halts[n, place]))) for n in range(how.steps)]
    return Chosen(answers, place, cells[-1])


def report_choice(puzzle: Puzzle, found: Chosen, choice: str) -> list[str]:
    """Return lines that say how the answer was chosen, and how many trajectories keep the rules."""
    others = int((found.last == found.last[found.trajectory]).all(axis=1).sum()) - 1
    same = f"{counted(others, 'other')} {'has' if others == 1 else 'have'} the same answer"
    keeps = sum(not problem(puzzle, answer.reshape(puzzle.tokens.shape)) for answer in found.last)
    return [
        f"chosen by {choice}: trajectory {found.trajectory + 1} of {len(found.last)}; {same}",
        f"by the rules (which did not choose): {keeps} of {len(found.last)} trajectories solve it",
    ]


def _batch(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Return a batch with one puzzle, without labels."""
    cells = np.asarray(tokens, np.int32).reshape(1, -1)
    return {
        "inputs": cells,
        "labels": np.full_like(cells, IGNORED),
        "puzzle_identifiers": np.full(1, BLANK, np.int32),
    }


@functools.partial(jax.jit, static_argnames=("graph", "objective", "how"))
def _explored(params, graph, objective, batch, draws, how):
    return breadth.explore(objective, nnx.merge(graph, params), batch, draws, how)


@functools.partial(jax.jit, static_argnames=("graph", "objective"))
def _step(params, graph, objective, carry, batch):
    carry, logits, halt_logits = objective.step_on(nnx.merge(graph, params), carry, batch)
    return carry, jnp.argmax(logits, axis=-1).astype(jnp.int32), halt_logits


def report(puzzle: Puzzle, answers: Sequence[Answer]) -> list[str]:
    """Return lines for a terminal: the puzzle, the changes of each step, the last answer and its verdict."""
    size = puzzle.tokens.shape
    lines, before = ["puzzle", board_text(puzzle.kind, puzzle.tokens)], puzzle.tokens.ravel()
    for number, answer in enumerate(answers, 1):
        places = np.flatnonzero(answer.cells != before)
        lines += ["", f"step {number}: probability of halting {answer.halt:.3f}; {_changes(places, size[1])}"]
        lines += [board_text(puzzle.kind, answer.cells.reshape(size))] if len(places) else []
        before = answer.cells
    last = before.reshape(size)
    return [*lines, "", f"after {counted(len(answers), 'step')}", board_text(puzzle.kind, last), verdict(puzzle, last)]


def verdict(puzzle: Puzzle, answer: np.ndarray) -> str:
    """Return the verdict on an answer, tokens of the puzzle's shape."""
    wrong = problem(puzzle, answer)
    return f"NOT a solution: {wrong}" if wrong else "a valid solution, which keeps all givens"


def problem(puzzle: Puzzle, answer: np.ndarray) -> str:
    """Return why an answer, tokens of the puzzle's shape, does not solve the puzzle; "" if it does."""
    return {"sudoku": _problem_of_sudoku, "maze": _problem_of_maze}[puzzle.kind](puzzle.tokens, answer)


def mistakes(puzzle: Puzzle, answer: np.ndarray) -> np.ndarray:
    """Return which cells of an answer are wrong whatever the solution is, bool of the puzzle's shape.

    These are changed givens and, in a Sudoku, digits that occur twice in a row, a column or a box.
    """
    given = puzzle.tokens
    if puzzle.kind == "maze":
        return maze.without_path(answer) != maze.without_path(given)
    height, width = BOXES[len(given)]
    rows, columns = np.indices(given.shape)
    wrong = (given != EMPTY) & (answer != given)
    for group in (rows, columns, rows // height * len(given) + columns // width):
        key = group * (answer.max() + 1) + answer
        wrong |= (np.bincount(key.ravel())[key] > 1) & (answer != EMPTY)
    return wrong


def _changes(places: np.ndarray, width: int) -> str:
    """Return a text with the cells that a step changed, as (row, column) from 1."""
    if not len(places):
        return "nothing changed"
    cells = [f"({place // width + 1}, {place % width + 1})" for place in places.tolist()]
    return f"{counted(len(cells), 'cell')} changed, (row, column): {listed(cells, LISTED_CELLS, ' ')}"


def _problem_of_sudoku(given: np.ndarray, answer: np.ndarray) -> str:
    changed = int(((given != EMPTY) & (answer != given)).sum())
    if changed:
        return f"it changes {changed} of the {int((given != EMPTY).sum())} givens"
    if not sudoku.is_solved(answer[None] - 1)[0]:
        return "some row, column or box does not have every digit once"
    return ""


def _problem_of_maze(given: np.ndarray, answer: np.ndarray) -> str:
    changed = int((maze.without_path(answer) != maze.without_path(given)).sum())
    if changed:
        return f"it changes {changed} of the {given.size} given cells, not only cells on the path"
    drawn = answer == maze.PATH
    on_path, on_floor = (_distance(answer, allowed) for allowed in (drawn, answer != maze.WALL))
    if on_path is None:
        return "the cells of its path do not lead from S to G"
    if on_path != drawn.sum() + 1:
        return "its path has cells that a path from S to G does not need"
    return "" if on_path == on_floor else f"its path has {on_path} steps, the shortest {on_floor}"


def _distance(board: np.ndarray, allowed: np.ndarray) -> int | None:
    """Return the length of the shortest path from S to G over allowed cells; None if there is none."""
    (start,), (goal,) = (map(tuple, np.argwhere(board == token).tolist()) for token in (maze.START, maze.GOAL))
    free = {*map(tuple, np.argwhere(allowed).tolist()), goal}
    reached, steps = {start}, 0
    while reached and goal not in reached:
        free -= reached
        reached = {(y + down, x + across) for y, x in reached for down, across in maze.STEPS} & free
        steps += 1
    return steps if reached else None
