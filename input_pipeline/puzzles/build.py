# SPDX-License-Identifier: Apache-2.0
"""Puzzle data sets, built from published files or drawn at random, and cached under a digest of their inputs.

The public functions are sources. A data set is written to the cache atomically. It is made once, even if several
processes ask for it.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from files.paths import expanded
from input_pipeline.cache import cache_folder, locked, write_json
from input_pipeline.errors import DataError
from input_pipeline.progress import progress
from input_pipeline.puzzles import arc, dataset, drawn, maze, sudoku, sudoku_generator, tables
from input_pipeline.puzzles.dataset import BLANK, Plan
from input_pipeline.puzzles.drawn import Puzzles
from input_pipeline.puzzles.sudoku_generator import EASY_CLUES, FEWEST_CLUES
from input_pipeline.puzzles.sudoku_solver import BOXES
from input_pipeline.puzzles.windows import PuzzleEpochs, PuzzleWindows
from input_pipeline.threads import in_threads

FORMAT = 1  # version of the data sets; another number gives another folder
DRAWING = 2  # version of the way in which rows are drawn from tables; another number gives another folder
SUDOKU_SIDE, MAZE_SIDE = 9, 30  # of puzzles in files
TOGETHER = 4096  # held-out boards per write
OPTIONS = ("puzzle_count", "puzzle_augmentations", "puzzle_min_difficulty")
OPTIONS_OF_DRAWN = (*OPTIONS, "puzzle_size", "puzzle_clues", "puzzle_heldout")

SETTINGS = "data.puzzle_size, data.puzzle_min_difficulty"  # other values may allow more puzzles

Announce = Callable[[str], object]
Pair = tuple[PuzzleEpochs, PuzzleWindows]


class Boards(NamedTuple):
    """Square boards of one kind; each is a puzzle with one example."""

    name: str  # plural
    side: int
    vocab_size: int
    num_versions: int  # of each training puzzle, itself first
    draw: Callable  # (generator, number) -> that many random puzzles, as for `drawn.split`
    checked: Callable[[tables.Table], Puzzles]  # raises DataError if a row is not a puzzle
    versions: Callable  # (question, answer, generator) -> both in all versions, tokens [num_versions, side, side]
    settings: str  # keys that allow more puzzles, for messages


def published(data, path: str, **_) -> Pair:
    """Return the windows of a folder that is already a data set; DataError if it is not."""
    folder = _folder(path, "train and test, each with a dataset.json")
    train, heldout = _opened(folder, dataset.digest(folder))
    _ = heldout.test_puzzles  # an error in them is reported before training, and not at the votes
    return train, heldout


def sudokus(data, path: str, seed: int, announce: Announce, **_) -> Pair:
    """Return Sudokus of the tables train.csv and test.csv in a folder, or random ones without a folder."""
    side = SUDOKU_SIDE if path else data.puzzle_size
    if side not in BOXES:
        raise DataError(f"data.puzzle_size={side} is not a size of Sudokus; use one of {', '.join(map(str, BOXES))}")
    if not path and data.puzzle_clues and not FEWEST_CLUES[side] <= data.puzzle_clues < side**2:
        raise DataError(
            f"data.puzzle_clues={data.puzzle_clues}: no Sudoku of size {side} with that many clues has one solution; "
            f"use 0, or {FEWEST_CLUES[side]} to {side**2 - 1}"
        )

    def draw(generator: np.random.Generator, number: int) -> drawn.Drawn:
        return sudoku_generator.draw(generator, number, side, data.puzzle_clues)

    def versions(question: np.ndarray, answer: np.ndarray, generator: np.random.Generator) -> tuple:
        draws = sudoku.draw(generator, data.puzzle_augmentations, side)
        boards = (question - 1, answer - 1)
        return tuple(1 + np.concatenate([board[None], sudoku.augment(board, *draws)]) for board in boards)

    settings = f"data.puzzle_clues (0, or {EASY_CLUES[side]} and more), {SETTINGS}"
    number = 1 + data.puzzle_augmentations
    boards = Boards("Sudokus", side, side + 2, number, draw, _sudoku_table, versions, settings)
    return _boards(data, path, seed, announce, boards)


def mazes(data, path: str, seed: int, announce: Announce, **_) -> Pair:
    """Return mazes of the tables train.csv and test.csv in a folder, or random ones without a folder."""
    side = MAZE_SIDE if path else data.puzzle_size
    if side < 3:
        raise DataError(f"data.puzzle_size={side} is not a size of mazes; use 3 or more")
    count = 8 if data.puzzle_augmentations else 1

    def draw(generator: np.random.Generator, number: int) -> drawn.Drawn:
        return maze.draw(generator, number, side)

    def versions(question: np.ndarray, answer: np.ndarray, generator: np.random.Generator) -> tuple:
        return tuple(maze.versions(board)[:count] for board in (question, answer))

    boards = Boards("mazes", side, len(maze.CHARACTERS) + 1, count, draw, _maze_table, versions, SETTINGS)
    return _boards(data, path, seed, announce, boards)


def arc_tasks(data, path: str, seed: int, announce: Announce, **_) -> Pair:
    """Return the ARC tasks of data.puzzle_set in a folder; the test pairs of one subset are held out."""
    folder = _folder(path, "*_challenges.json and *_solutions.json of the subsets of data.puzzle_set")
    number = data.puzzle_augmentations
    facts = {"kind": "arc", "set": data.puzzle_set, "augmentations": number, "seed": seed}

    def build(place: Path) -> None:
        tasks = arc.read_tasks(folder, data.puzzle_set, seed)
        with progress("drawing versions", len(tasks), announce, "tasks") as advance:
            versions = []
            for found in in_threads(
                lambda task: arc.draw_versions(tasks[task], number, np.random.default_rng([seed, task, 0])),
                range(len(tasks)),
            ):
                versions.append(found)
                advance(1)
        names = [name for pair in zip(tasks, versions, strict=True) for name in _names(*pair)]
        splits = _arc_plans(tasks, versions, seed)
        _write(place, splits, [BLANK, *names], "encoding grids", announce)
        tests = {
            task.name: {"train": _json(task.train), "test": _json(task.test, task.unknown)}
            for task in tasks if task.held_out
        }  # fmt: skip
        write_json(place / "test_puzzles.json", tests)

    return _cached(data, arc.files(folder, data.puzzle_set), facts, build, announce)


def _boards(data, path: str, seed: int, announce: Announce, boards: Boards) -> Pair:
    """Return boards of the tables in a folder, or random ones without a folder."""
    cells, files = boards.side**2, _tables(path) if path else []

    def puzzles() -> tuple[Puzzles, Puzzles]:
        if path:
            options = {"cells": cells, "least_rating": data.puzzle_min_difficulty, "seed": seed}
            counts = (data.puzzle_count, None)
            found = (tables.read(file, count=count, **options) for file, count in zip(files, counts, strict=True))
            return tuple(map(boards.checked, found))
        return drawn.split(
            boards.draw, train=data.puzzle_count, heldout=data.puzzle_heldout, least_rating=data.puzzle_min_difficulty,
            seed=seed, name=f"{boards.name} {boards.side} x {boards.side}", settings=boards.settings, announce=announce,
        )  # fmt: skip

    def build(place: Path) -> None:
        train, heldout = puzzles()

        def trained(groups: range) -> tuple:
            (group,) = groups
            pair = (of[group].reshape(boards.side, boards.side) for of in train)
            both = boards.versions(*pair, np.random.default_rng([seed, group]))
            return tuple(versions.reshape(-1, cells) for versions in both)

        def held_out(groups: range) -> tuple:
            return tuple(of[groups.start : groups.stop] for of in heldout)

        sizes = [[1] * boards.num_versions] * len(train.questions)
        plans = {
            "train": Plan(cells, boards.vocab_size, sizes, trained),
            "test": Plan(cells, boards.vocab_size, [[1]] * len(heldout.questions), held_out, together=TOGETHER),
        }
        _write(place, plans, [BLANK], "writing puzzles", announce)

    options = {name: data[name] for name in (OPTIONS if path else OPTIONS_OF_DRAWN)}
    facts = {"kind": data.source, "seed": seed} | options | ({"drawing": DRAWING} if path else {})
    return _cached(data, files, facts, build, announce)


def _cached(data, files: list[Path], facts: dict, build: Callable[[Path], None], announce: Announce) -> Pair:
    """Return the windows of a cached data set, named by a digest of its files and facts; build it if missing."""
    digest = dataset.digest_of(files, facts | {"format": FORMAT})
    folder = cache_folder(data.cache_dir) / "puzzles" / digest

    def build_of_these(place: Path) -> None:
        build(place)
        if dataset.digest_of(files, facts | {"format": FORMAT}) != digest:
            raise DataError(f"{files[0].parent}: a file changed while it was read; run again when nothing writes to it")

    if not folder.exists():
        with locked(folder.with_suffix(".lock"), announce):
            if not folder.exists():
                _build(folder, build_of_these)
    return _opened(folder, digest)


def _opened(folder: Path, digest: str) -> Pair:
    train, heldout = (dataset.open_split(folder, name) for name in ("train", "test"))
    cells = [split.metadata["seq_len"] for split in (train, heldout)]
    if cells[0] != cells[1]:
        raise DataError(f"{folder}: puzzles of train have {cells[0]} cells, those of test {cells[1]}; build it again")
    return PuzzleEpochs(train, digest), PuzzleWindows(heldout, digest)


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)  # left by a killed process
    try:
        part.mkdir()
        build(part)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write(place: Path, plans: dict[str, Plan], identifiers: list[str], title: str, announce: Announce) -> None:
    num_bytes = sum(2 * plan.num_examples * plan.seq_len for plan in plans.values())  # of inputs and labels
    with progress(title, num_bytes, announce) as advance:
        dataset.write(place, plans, identifiers, advance)
    counts = [f"{plan.num_examples:,} in {name}" for name, plan in plans.items()]
    announce(f"puzzles: {', '.join(counts)}, with {len(plans['train'].sizes):,} groups in train")


def _folder(path: str, what: str) -> Path:
    folder = expanded(path)
    if not path or not folder.is_dir():
        raise DataError(f"data.path={path!r} is not a folder; name a folder with {what}")
    return folder


def _tables(path: str) -> list[Path]:
    return [_folder(path, "train.csv and test.csv") / name for name in ("train.csv", "test.csv")]


def _sudoku_table(table: tables.Table) -> Puzzles:
    digits = "123456789"
    questions, answers = tables.codes(table, f".{digits}", {"question": f".{digits}", "answer": digits})
    table.reject(((questions > 0) & (questions != answers)).any(axis=1), "question contradicts its answer")
    boards = answers.reshape(-1, SUDOKU_SIDE, SUDOKU_SIDE)
    table.reject(~sudoku.is_solved(boards), "answer is not a solved Sudoku")
    return Puzzles(questions + 1, answers + 1)


def _maze_table(table: tables.Table) -> Puzzles:
    allowed = {"question": maze.CHARACTERS[:-1], "answer": maze.CHARACTERS}
    questions, answers = (1 + codes for codes in tables.codes(table, maze.CHARACTERS, allowed))
    for end, token in (("S", maze.START), ("G", maze.GOAL)):
        table.reject((questions == token).sum(axis=1) != 1, f"question needs exactly one {end}")
    table.reject((questions != maze.without_path(answers)).any(axis=1), "question contradicts its answer")
    return Puzzles(questions, answers)


def _names(task: arc.Task, versions: arc.Versions) -> list[str]:
    changed = zip(versions.turns[1:].tolist(), versions.colours[1:], strict=True)
    return [task.name, *(arc.version_name(task.name, turn, colours) for turn, colours in changed)]


def _arc_plans(tasks: list[arc.Task], versions: list[arc.Versions], seed: int) -> dict[str, Plan]:
    """Return the splits: demonstration pairs are trained on, and so are test pairs unless they are held out."""
    firsts = np.cumsum([1, *(len(found.turns) for found in versions)])  # identifier of each task
    of_tests = [number for number, task in enumerate(tasks) if task.held_out]
    trained = [task.train if task.held_out else [*task.train, *task.test] for task in tasks]

    def train(groups: range) -> tuple[np.ndarray, np.ndarray]:
        (group,) = groups
        found, pairs = versions[group], trained[group]
        offsets = arc.draw_offsets(pairs, found.turns, np.random.default_rng([seed, group, 1]))
        return arc.sequences(pairs, found, offsets)

    def test(groups: range) -> tuple[np.ndarray, np.ndarray]:
        (number,) = of_tests[groups.start : groups.stop]
        found, pairs = versions[number], tasks[number].test
        inputs, labels = arc.sequences(pairs, found, np.zeros((len(found.turns), len(pairs), 2), np.int64))
        labels.reshape(len(found.turns), len(pairs), -1)[:, list(tasks[number].unknown)] = 0  # label 0 has no loss
        return inputs, labels

    def plan(numbers: list[int], pairs: list[list], examples: Callable) -> Plan:
        sizes = [[len(of)] * len(versions[number].turns) for number, of in zip(numbers, pairs, strict=True)]
        identifiers = np.concatenate([np.arange(firsts[number], firsts[number + 1]) for number in numbers])
        return Plan(arc.SIDE**2, arc.VOCAB_SIZE, sizes, examples, identifiers)

    return {
        "train": plan(list(range(len(tasks))), trained, train),
        "test": plan(of_tests, [tasks[number].test for number in of_tests], test),
    }


def _json(pairs: list[arc.Pair], unknown: tuple[int, ...] = ()) -> list[dict]:
    return [
        {"input": given.tolist()} | ({} if number in unknown else {"output": made.tolist()})
        for number, (given, made) in enumerate(pairs)
    ]
