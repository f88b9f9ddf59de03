# SPDX-License-Identifier: Apache-2.0
"""Draws random mazes with a single path from start to goal, and defines the tokens of their cells.

A solver marks the path, and checks that there is no other. Maze-Unique of arXiv:2605.21488 has such mazes,
with the same tokens. `data.puzzle_min_difficulty` is the least number of steps from start to goal.
"""

import numpy as np

from input_pipeline.puzzles.dihedral import dihedral
from input_pipeline.puzzles.drawn import Drawn

CHARACTERS = "# SGo"  # the token of a cell is its index here + 1; 0 is padding
WALL, FLOOR, START, GOAL, PATH = range(1, 6)
STEPS = ((0, 1), (1, 0), (0, -1), (-1, 0))


def versions(maze: np.ndarray) -> np.ndarray:
    """Return the rotations and reflections of a maze [side, side], itself first: [8, side, side]."""
    return np.stack([dihedral(maze, number) for number in range(8)])


def without_path(board: np.ndarray) -> np.ndarray:
    """Return a board with floor in place of the cells of its path."""
    return np.where(board == PATH, FLOOR, board)


def draw(generator: np.random.Generator, number: int, side: int) -> Drawn:
    """Draw mazes whose free cells form a tree, so that the path from start to goal is unique.

    Returns:
        questions and answers as tokens [number, side * side]; a rating is the number of steps from start to
            goal. A form is shared by all rotations and reflections of a maze.
    """
    made = [_maze(generator, side) for _ in range(number)]
    questions, answers = (np.stack([maze[place].ravel() for maze in made]) for place in (0, 1))
    forms = [min(version.tobytes() for version in versions(maze[0])) for maze in made]
    return Drawn(questions, answers, np.array([maze[2] for maze in made]), forms)


def _maze(generator: np.random.Generator, side: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (a maze uint8 [side, side], the same maze with its path, the number of steps of the path)."""
    grid, rooms = _tree(generator, (side + 1) // 2)
    maze = np.full((side, side), WALL, np.uint8)
    maze[: len(grid), : len(grid)] = grid
    start, goal = (rooms[place] for place in generator.choice(len(rooms), 2, replace=False))
    maze[start], maze[goal] = START, GOAL
    (path,) = solutions(maze)  # a second one is an error of the generator
    solved = maze.copy()
    solved[tuple(np.array(path[1:-1]).T)] = PATH
    return maze, solved, len(path) - 1


def solutions(maze: np.ndarray, most: int = 2) -> list[list[tuple[int, int]]]:
    """Return the paths from start to goal that visit no cell twice, `most` at most, by depth-first search.

    A path is a list of its cells (row, column), start and goal included. `maze` is tokens [height, width], in which the
    cells of a marked path are as free as floor.
    """
    (start,), (goal,) = (map(tuple, np.argwhere(maze == token).tolist()) for token in (START, GOAL))
    free = set(map(tuple, np.argwhere(maze != WALL).tolist()))
    found, path, on_path = [], [start], {start}
    waiting = [iter(STEPS)]
    while waiting and len(found) < most:
        step = next(waiting[-1], None)
        if step is None:
            waiting.pop()
            on_path.discard(path.pop())
            continue
        cell = path[-1][0] + step[0], path[-1][1] + step[1]
        if cell == goal:
            found.append([*path, goal])
        elif cell in free and cell not in on_path:
            path.append(cell)
            on_path.add(cell)
            waiting.append(iter(STEPS))
    return found


def _tree(generator: np.random.Generator, rooms: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return a random tree of long corridors, by depth-first search over rooms at even rows and columns.

    Returns:
        uint8 [2 * rooms - 1, 2 * rooms - 1] of walls and floor, and all rooms (row, column).
    """
    grid = np.full((2 * rooms - 1, 2 * rooms - 1), WALL, np.uint8)
    first = tuple((2 * generator.integers(0, rooms, 2)).tolist())
    found, trail = {first: None}, [first]  # in order
    while trail:
        row, column = trail[-1]
        near = [(row + 2 * down, column + 2 * right) for down, right in STEPS]
        near = [room for room in near if room not in found and all(0 <= place < len(grid) for place in room)]
        if not near:
            trail.pop()
            continue
        room = near[int(generator.random() * len(near))]
        grid[(row + room[0]) // 2, (column + room[1]) // 2] = FLOOR
        found[room] = None
        trail.append(room)
    grid[::2, ::2] = FLOOR
    return grid, list(found)
