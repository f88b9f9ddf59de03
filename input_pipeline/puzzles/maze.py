# SPDX-License-Identifier: Apache-2.0
"""Draws random mazes with a single path from start to goal, and defines the tokens of their cells."""

import itertools

import numpy as np

from input_pipeline.puzzles.dihedral import dihedral
from input_pipeline.puzzles.drawn import Drawn

CHARACTERS = "# SGo"  # the token of a cell is its index here + 1; 0 is padding
WALL, FLOOR, START, GOAL, PATH = range(1, 6)
LARGEST_SIDE = 30
STEPS = ((0, 1), (1, 0), (0, -1), (-1, 0))


def versions(maze: np.ndarray) -> np.ndarray:
    """Return the rotations and reflections of a maze [side, side], itself first: [8, side, side]."""
    return np.stack([dihedral(maze, number) for number in range(8)])


def draw(generator: np.random.Generator, number: int, side: int) -> Drawn:
    """Draw mazes whose free cells form a tree, so that the path from start to goal is unique.

    Returns:
        questions and answers as tokens [number, side * side]; a rating is the number of steps from start to
            goal.
    """
    made = [_maze(generator, side) for _ in range(number)]
    questions, answers = (np.stack([maze[place].ravel() for maze in made]) for place in (0, 1))
    forms = [min(version.tobytes() for version in versions(maze[0])) for maze in made]
    return Drawn(questions, answers, np.array([maze[2] for maze in made]), forms)


def _maze(generator: np.random.Generator, side: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (a maze uint8 [side, side], the same maze with its path, the number of steps of the path)."""
    grid, parents = _tree(generator, (side + 1) // 2)
    maze = np.full((side, side), WALL, np.uint8)
    maze[: len(grid), : len(grid)] = grid
    rooms = list(parents)
    start, goal = (rooms[place] for place in generator.choice(len(rooms), 2, replace=False))
    path = _path(start, goal, parents)
    solved = maze.copy()
    for cell, after in itertools.pairwise(path):
        solved[cell] = solved[(cell[0] + after[0]) // 2, (cell[1] + after[1]) // 2] = PATH
    for board in (maze, solved):
        board[start], board[goal] = START, GOAL
    return maze, solved, 2 * (len(path) - 1)


def _tree(generator: np.random.Generator, rooms: int) -> tuple[np.ndarray, dict]:
    """Return a random tree of long corridors, by depth-first search over rooms at even rows and columns.

    Returns:
        uint8 [2 * rooms - 1, 2 * rooms - 1] of walls and floor, and {room: its parent}; the parent of the root is None.
    """
    grid = np.full((2 * rooms - 1, 2 * rooms - 1), WALL, np.uint8)
    first = tuple((2 * generator.integers(0, rooms, 2)).tolist())
    parents, trail = {first: None}, [first]
    while trail:
        row, column = trail[-1]
        near = [(row + 2 * down, column + 2 * right) for down, right in STEPS]
        near = [room for room in near if room not in parents and all(0 <= place < len(grid) for place in room)]
        if not near:
            trail.pop()
            continue
        room = near[int(generator.random() * len(near))]
        grid[(row + room[0]) // 2, (column + room[1]) // 2] = FLOOR
        parents[room] = trail[-1]
        trail.append(room)
    grid[::2, ::2] = FLOOR
    return grid, parents


def _path(start: tuple, goal: tuple, parents: dict) -> list[tuple]:
    """Return the rooms from start to goal, both included, through their lowest common ancestor."""
    above = _to_root(start, parents)
    other = _to_root(goal, parents)
    common = next(room for room in above if room in set(other))
    return above[: above.index(common)] + other[: other.index(common) + 1][::-1]


def _to_root(room: tuple, parents: dict) -> list[tuple]:
    rooms = []
    while room is not None:
        rooms.append(room)
        room = parents[room]
    return rooms
