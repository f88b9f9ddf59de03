# SPDX-License-Identifier: Apache-2.0
"""Converts ARC grids to tokens and back, draws and names versions of tasks, and reads the tasks of a folder.

A grid is uint8 [rows, columns] of colours 0 to 9, both sides 1 to 30. A sequence is a canvas of 30 x 30 tokens: 0 is
padding, 1 the border below a grid and to its right, and colours begin at 2. A version of a task has its colours
permuted, except black (0), and then all its grids rotated or reflected in the same way; its name says how.
"""

import re
from pathlib import Path
from typing import NamedTuple, NotRequired

import numpy as np

from files.json_reader import Object
from input_pipeline.errors import DataError
from input_pipeline.order import mix
from input_pipeline.puzzles.dataset import read_json
from input_pipeline.puzzles.dihedral import dihedral, undo

SIDE = 30  # of the canvas
BORDER, FIRST_COLOUR = 1, 2  # tokens
COLOURS = 10
VOCAB_SIZE = FIRST_COLOUR + COLOURS
SEPARATOR = "|||"
DRAWS_PER_VERSION = 5  # draws before a task is taken to have no further versions
SUBSETS = {  # {data.puzzle_set: its subsets, and the subset whose test pairs are held out}
    "arc1": (("training", "evaluation", "concept"), "evaluation"),
    "arc2": (("training2", "evaluation2", "concept"), "evaluation2"),
}

Pair = tuple[np.ndarray, np.ndarray]  # an input grid and its output grid
Rows = list[list[int]]  # a grid in JSON


class PairInFile(Object):
    """A pair; its answer may be in another file."""

    input: Rows
    output: NotRequired[Rows]


class TaskInFile(Object):
    """A task in a file of challenges."""

    train: list[PairInFile]
    test: list[PairInFile]


class Task(NamedTuple):
    """A task: demonstration pairs, test pairs, and whether the test pairs are held out.

    Held-out pairs may have unknown answers; `unknown` has the numbers of these pairs, whose answer is a single cell.
    """

    name: str
    train: list[Pair]
    test: list[Pair]
    held_out: bool
    unknown: tuple[int, ...] = ()


class Versions(NamedTuple):
    """Versions of a task, itself first."""

    turns: np.ndarray  # int [N], numbers of `dihedral`
    colours: np.ndarray  # uint8 [N, 10], what each colour becomes


def encode(grids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return grids of one shape [N, rows, columns] as sequences, each at its offset, int [N, 2]: uint8 [N, 900]."""
    number, height, width = grids.shape
    block = np.zeros((number, height + 1, width + 1), np.uint8)
    block[:, :height, :width] = grids + np.uint8(FIRST_COLOUR)
    block[:, height, :width] = block[:, :height, width] = BORDER
    canvas = np.zeros((number, SIDE + 1, SIDE + 1), np.uint8)  # one more, for borders that fall outside
    rows = offsets[:, 0, None, None] + np.arange(height + 1)[:, None]
    columns = offsets[:, 1, None, None] + np.arange(width + 1)
    canvas[np.arange(number)[:, None, None], rows, columns] = block
    return canvas[:, :SIDE, :SIDE].reshape(number, -1)


def crop(sequence: np.ndarray) -> np.ndarray:
    """Return the grid in a sequence [900]: uint8 [rows, columns], of shape [0, 0] if there is none.

    It is the largest rectangle of colours from the upper left corner, and the lowest of equally large ones.
    """
    canvas = np.asarray(sequence).reshape(SIDE, SIDE)
    is_colour = (canvas >= FIRST_COLOUR) & (canvas < VOCAB_SIZE)
    widths = np.minimum.accumulate(np.logical_and.accumulate(is_colour, axis=1).sum(axis=1))
    areas = widths * np.arange(1, SIDE + 1)
    height = int(areas.argmax()) + 1 if areas.any() else 0
    return (canvas[:height, : widths[height - 1] if height else 0] - FIRST_COLOUR).astype(np.uint8)


def restore(grid: np.ndarray, turn: int, colours: np.ndarray) -> np.ndarray:
    """Return the grid whose colours were permuted, and that then was rotated or reflected, into this one."""
    return np.argsort(colours).astype(np.uint8)[undo(grid, turn)]


def version_name(task: str, turn: int, colours: np.ndarray) -> str:
    """Return the name of a version, as in `task|||t3|||0123456789`."""
    return f"{task}{SEPARATOR}t{turn}{SEPARATOR}{''.join(map(str, colours.tolist()))}"


def parse_name(name: str) -> tuple[str, int, np.ndarray]:
    """Return (task, turn, colours) of a name; the name of a task is that of its unchanged version.

    Raises DataError if it is not such a name.
    """
    task, *changes = name.split(SEPARATOR)
    if not changes:
        return task, 0, np.arange(COLOURS, dtype=np.uint8)
    turn, colours = changes if len(changes) == 2 else ("", "")
    if not re.fullmatch("t[0-7]", turn) or sorted(colours) != sorted("0123456789"):
        raise DataError(f"{name!r:.80} is not the name of a version, such as x{SEPARATOR}t3{SEPARATOR}0123456789")
    return task, int(turn.removeprefix("t")), np.array(list(map(int, colours)), np.uint8)


def draw_versions(task: Task, number: int, generator: np.random.Generator) -> Versions:
    """Return a task and `number` different versions of it, or fewer if drawing finds no others."""
    turns, colours = [np.zeros(1, np.int64)], [np.arange(COLOURS, dtype=np.uint8)[None]]
    met = set(_hashes(task, turns[0], colours[0]).tolist())
    drawn = 0
    while len(met) <= number and drawn < DRAWS_PER_VERSION * number:
        drawn += number
        turn = generator.integers(0, 8, number)
        colour = np.zeros((number, COLOURS), np.uint8)
        colour[:, 1:] = 1 + generator.random((number, COLOURS - 1)).argsort(axis=1)
        new = []
        for place, key in enumerate(_hashes(task, turn, colour).tolist()):
            if key not in met and len(met) <= number:
                met.add(key)
                new.append(place)
        turns.append(turn[new])
        colours.append(colour[new])
    return Versions(np.concatenate(turns), np.concatenate(colours))


def draw_offsets(pairs: list[Pair], turns: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Draw the offset of each pair on the canvas: int [versions, pairs, 2]; one pair of each version is at (0, 0)."""
    free = np.array([SIDE - np.maximum(given.shape, made.shape) for given, made in pairs])  # [pairs, 2]
    swapped = np.isin(turns, [1, 3, 6, 7])  # rows become columns
    free = np.where(swapped[:, None, None], free[:, ::-1], free)
    offsets = np.floor(generator.random(free.shape) * (free + 1)).astype(np.int64)
    offsets[np.arange(len(turns)), generator.integers(0, len(pairs), len(turns))] = 0
    return offsets


def sequences(pairs: list[Pair], versions: Versions, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of all versions, version after version: inputs and labels, uint8 [versions * pairs, 900]."""
    both = tuple(np.empty((len(versions.turns), len(pairs), SIDE * SIDE), np.uint8) for _ in range(2))
    for turn in np.unique(versions.turns).tolist():
        rows = np.flatnonzero(versions.turns == turn)
        for nth, pair in enumerate(pairs):
            for grid, encoded in zip(pair, both, strict=True):
                moved = dihedral(grid, turn)
                encoded[rows, nth] = encode(versions.colours[rows][:, moved], offsets[rows, nth])
    return tuple(encoded.reshape(-1, SIDE * SIDE) for encoded in both)


def read_tasks(folder: Path, puzzle_set: str, seed: int) -> list[Task]:
    """Return the tasks of a set, subset by subset; each subset is in random order.

    Raises DataError if a file is missing or is not JSON, a grid is invalid, or an answer to train on is missing.
    """
    subsets, heldout = SUBSETS[puzzle_set]
    tasks = []
    for number, subset in enumerate(subsets):
        found = _read_subset(folder, subset, subset == heldout)
        order = np.random.default_rng([seed, number]).permutation(len(found))
        tasks += [found[place] for place in order]
    return tasks


def files(folder: Path, puzzle_set: str) -> list[Path]:
    """Return the files that `read_tasks` reads; DataError if one is missing."""
    return [path for subset in SUBSETS[puzzle_set][0] for path in _paths(folder, subset)]


def _paths(folder: Path, subset: str) -> list[Path]:
    """Return the file of a subset's challenges, and that of its solutions if there is one."""
    found = sorted(folder.glob(f"*_{subset}_challenges.json"))
    if len(found) != 1:
        what = "no file" if not found else f"{len(found)} files"
        raise DataError(f"data.path={folder} has {what} *_{subset}_challenges.json; it needs exactly one")
    solved = sorted(folder.glob(f"*_{subset}_solutions.json"))
    if len(solved) > 1:
        raise DataError(f"data.path={folder} has {len(solved)} files *_{subset}_solutions.json; it needs at most one")
    return found + solved


def _read_subset(folder: Path, subset: str, held_out: bool) -> list[Task]:
    path, *solved = _paths(folder, subset)
    challenges = read_json(path, dict[str, TaskInFile])
    solutions = read_json(solved[0], dict[str, list[Rows | None]]) if solved else {}
    if not challenges:
        raise DataError(f"{path}: has no tasks; it needs an object with tasks by name")
    return [_task(path, name, task, solutions.get(name, []), held_out) for name, task in sorted(challenges.items())]


def _task(path: Path, name: str, task: TaskInFile, solutions: list[Rows | None], held_out: bool) -> Task:
    where = f"{path}: task {name:.80}"
    if SEPARATOR in name:
        raise DataError(
            f"{where}: has {SEPARATOR} in its name, which separates the parts of a version's name; rename it"
        )
    answers = [
        pair.get("output", solutions[nth] if nth < len(solutions) else None) for nth, pair in enumerate(task["test"])
    ]
    unknown = tuple(nth for nth, answer in enumerate(answers) if answer is None)
    tests = [
        (pair["input"], [[0]] if answer is None else answer) for pair, answer in zip(task["test"], answers, strict=True)
    ]
    pairs = [(pair["input"], pair.get("output")) for pair in task["train"]]
    if not pairs or not tests:
        raise DataError(f"{where}: has no {'train' if not pairs else 'test'} pairs; add some, or remove the task")
    if any(made is None for _, made in pairs):
        raise DataError(f"{where}: a train pair has no 'output'; add it, or remove the pair")
    grids = [[tuple(grid_of(where, grid) for grid in pair) for pair in part] for part in (pairs, tests)]
    if unknown and not held_out:
        kept = path.name.replace("_challenges", "_solutions")
        raise DataError(f"{where}: test pair {unknown[0]} has no answer to train on; add it as 'output' or to {kept}")
    return Task(name, *grids, held_out, unknown)


def grid_of(where: str, rows: Rows) -> np.ndarray:
    """Return uint8 [rows, columns]; DataError, which begins with `where`, if it is not a rectangle of colours."""
    widths = {len(row) for row in rows}
    is_canvas = len(widths) == 1 and 1 <= min(widths) <= SIDE and 1 <= len(rows) <= SIDE
    if not is_canvas or not all(0 <= colour < COLOURS for row in rows for colour in row):
        raise DataError(f"{where}: a grid must be a rectangle of colours 0 to 9 with sides from 1 to {SIDE}")
    return np.array(rows, np.uint8)


def _hashes(task: Task, turns: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Return a hash of each version's pairs that does not depend on their order: uint64 [N]."""
    hashes = np.zeros(len(turns), np.uint64)
    for turn in np.unique(turns).tolist():
        rows = np.flatnonzero(turns == turn)
        for given, made in [*task.train, *task.test]:
            one, two = (_grid_hashes(dihedral(grid, turn), colours[rows]) for grid in (given, made))
            hashes[rows] += mix(one ^ mix(two))
    return hashes


def _grid_hashes(grid: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Return a hash of a grid's shape and cells under each renaming of its colours: uint64 [N]."""
    places = np.arange(SIDE)[: grid.shape[0], None] * SIDE + np.arange(grid.shape[1])
    cells = places.ravel() * COLOURS + colours[:, grid.ravel()].astype(np.int64)
    shape = np.uint64(grid.shape[0] * SIDE + grid.shape[1])
    return mix(_CELL_HASHES[cells].sum(axis=1, dtype=np.uint64) ^ mix(shape))


_CELL_HASHES = mix(np.arange(SIDE * SIDE * COLOURS, dtype=np.uint64))
