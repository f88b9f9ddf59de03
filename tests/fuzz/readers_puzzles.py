# SPDX-License-Identifier: Apache-2.0
"""Readers of puzzles to fuzz: tables of Sudokus and mazes, ARC's files, data sets that are built already."""

import functools
import json
import pathlib
import shutil
import tempfile

import numpy as np

from files.numpy_reader import map_integers
from input_pipeline.puzzles import arc, dataset, maze, sudoku_generator
from input_pipeline.puzzles.dataset import BLANK, Plan
from input_pipeline.sources import read_source
from tests.fuzz.data_section import section
from tests.fuzz.harness import reader

HEADER = "source,question,answer,rating"


def read_windows(folder, path, source: str, vocab_size: int, length: int) -> None:
    """Read all examples of both splits; tokens are those of the vocabulary."""
    data = section(folder, source=source, path=str(path), puzzle_count=2, puzzle_augmentations=1)
    for windows in read_source(data, vocab_size=vocab_size, seed=0, announce=str):
        batch = windows.read(windows.order(np.arange(windows.num_examples(length)), length, 0), length)
        assert batch["inputs"].shape == batch["labels"].shape and batch["inputs"].min() >= 0
        assert batch["inputs"].max() < vocab_size and batch["labels"].max() < vocab_size
        assert len(windows.identifiers) >= windows.num_identifiers > batch["puzzle_identifiers"].max()
        for name in windows.identifiers[1:4]:
            arc.parse_name(name)
        assert isinstance(windows.document_name(0), str) and isinstance(windows.test_puzzles, dict)


@functools.cache
def _sudokus() -> list[bytes]:
    made = sudoku_generator.draw(np.random.default_rng(0), 4, 9, 0)
    rows = [
        f"us,{''.join('.123456789'[token - 1] for token in question)},{''.join(str(t - 1) for t in answer)},{rating}"
        for question, answer, rating in zip(made.questions, made.answers, made.ratings, strict=True)
    ]
    return ["\n".join([HEADER, *rows]).encode()]


@functools.cache
def _mazes() -> list[bytes]:
    made = maze.draw(np.random.default_rng(0), 3, 30)
    texts = [["".join(maze.CHARACTERS[t - 1] for t in board) for board in of] for of in (made.questions, made.answers)]
    rows = [f'us,"{question}","{answer}",{n}' for n, (question, answer) in enumerate(zip(*texts, strict=True))]
    return ["\n".join([HEADER, *rows]).encode()]


def table_reader(source: str, good, vocab_size: int, length: int) -> None:
    """Register a reader of a table of puzzles to train on."""

    @reader(f"table of a {source}", good)
    def read(content: bytes, folder) -> None:
        (folder / "train.csv").write_bytes(content)
        (folder / "test.csv").write_bytes(good()[0])
        read_windows(folder, folder, source, vocab_size, length)


table_reader("sudoku", _sudokus, 11, 81)
table_reader("maze", _mazes, 6, 900)


@functools.cache
def _arc() -> dict[str, bytes]:
    """Return the files of ARC-1, a task or two each."""
    grid = [[1, 2, 3], [4, 0, 9]]
    pair, files = {"input": grid, "output": [[5]]}, {}
    for subset in arc.SUBSETS["arc1"][0]:
        tasks = {
            f"{subset}-a": {"train": [pair, pair], "test": [{"input": grid}]},
            f"{subset}-b": {"train": [pair], "test": [pair]},
        }
        files[f"arc-agi_{subset}_challenges.json"] = json.dumps(tasks).encode()
        files[f"arc-agi_{subset}_solutions.json"] = json.dumps({f"{subset}-a": [[[7, 7]]]}).encode()
    return files


def arc_reader(kind: str, subset: str) -> None:
    """Register a reader of one of these files."""
    name = f"arc-agi_{subset}_{kind}.json"

    @reader(f"arc {kind} {subset}", lambda: [_arc()[name]])
    def read(content: bytes, folder) -> None:
        (folder / "arc").mkdir()
        for other, good in _arc().items():
            (folder / "arc" / other).write_bytes(content if other == name else good)
        read_windows(folder, folder / "arc", "arc", 12, 900)


arc_reader("challenges", "training")
arc_reader("challenges", "evaluation")
arc_reader("solutions", "training")


@functools.cache
def _built() -> pathlib.Path:
    """Return a data set as such are published."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="fuzz")) / "set"
    cells = np.arange(24, dtype=np.uint8).reshape(6, 4)
    plan = Plan(4, 30, [[1, 2], [3]], lambda groups: (cells[3 * groups.start :][:3],) * 2, np.arange(1, 4))
    names = [BLANK, *(f"x|||t{n}|||0123456789" for n in range(3))]
    dataset.write(folder, {"train": plan, "test": plan}, names, str)
    tests = {"x": {"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[1]]}]}}
    (folder / "test_puzzles.json").write_text(json.dumps(tests))
    return folder


def built_reader(name: str) -> None:
    """Register a reader of a data set with one changed file."""

    @reader(f"puzzles: {name}", lambda: [(_built() / name).read_bytes()])
    def read(content: bytes, folder) -> None:
        shutil.copytree(_built(), folder / "set")
        (folder / "set" / name).write_bytes(content)
        read_windows(folder, folder / "set", "puzzles", 30, 4)


for changed in (
    "train/dataset.json", "train/all__inputs.npy", "train/all__puzzle_indices.npy", "train/all__puzzle_identifiers.npy",
    "identifiers.json", "test_puzzles.json",
):  # fmt: skip
    built_reader(changed)


def _arrays() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "a.npy")
        found = []
        for array in (np.arange(12, dtype=np.int32).reshape(3, 4), np.asfortranarray(np.ones((2, 3), np.uint8))):
            np.save(path, array)
            found.append(path.read_bytes())
        return found


@reader("numpy file", _arrays)
def read_array(content: bytes, folder) -> None:
    (folder / "a.npy").write_bytes(content)
    array = map_integers(folder / "a.npy", 2)
    assert np.asarray(array).shape == array.shape and np.issubdtype(array.dtype, np.integer)
