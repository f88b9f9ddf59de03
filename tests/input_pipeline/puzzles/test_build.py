# SPDX-License-Identifier: Apache-2.0
"""What is built: from tables or at random, once, whole or not at all, with what is held out apart."""

import copy
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from files import atomic
from input_pipeline import ledger, threads
from input_pipeline.corpus import prepare, prepare_to_evaluate
from input_pipeline.errors import DataError
from input_pipeline.puzzles import build, drawn, maze, sudoku, sudoku_generator
from input_pipeline.puzzles.sudoku_forms import forms

HEADER = "source,question,answer,rating"


def stored(windows) -> tuple[np.ndarray, np.ndarray]:
    """Return all inputs and labels of a split as they are on disk."""
    return np.asarray(windows._split.inputs), np.asarray(windows._split.labels)


def silent(line):
    pass


@pytest.fixture(scope="module")
def rows():
    """Rows of a table of 40 Sudokus."""
    questions, answers, ratings, _ = sudoku_generator.draw(np.random.default_rng(0), 40, 9, 0)
    return [
        [
            "us",
            "".join(".123456789"[token - 1] for token in question),
            "".join(str(token - 1) for token in answer),
            rating,
        ]
        for question, answer, rating in zip(questions, answers, map(str, ratings), strict=True)
    ]


@pytest.fixture
def table(tmp_path, rows):
    """Write train.csv and test.csv of 30 and 10 Sudokus, the first changed at will; return their folder."""

    def write(change=lambda rows: rows):
        folder = tmp_path / "tables"
        folder.mkdir(exist_ok=True)
        for name, part in (("train.csv", change(copy.deepcopy(rows[:30]))), ("test.csv", rows[30:])):
            (folder / name).write_text("\n".join([HEADER, *map(",".join, part)]) + "\n")
        return str(folder)

    return write


def test_tables_of_sudokus(table, section):
    folder = table()
    train, test = build.sudokus(section(), folder, 0, silent)
    assert (train.num_groups, len(stored(train)[0]), train.vocab_size, train.seq_len) == (12, 48, 11, 81)
    assert len(stored(test)[0]) == 10 and train.num_identifiers == 1 and train.identifiers == ["<blank>"]
    rows = [line.split(",") for line in Path(folder, "train.csv").read_text().splitlines()[1:]]
    questions = {tuple(1 + ".123456789".index(character) for character in row[1]) for row in rows}
    inputs, labels = (values.reshape(12, 4, 81) for values in stored(train))
    assert {tuple(first) for first in inputs[:, 0].tolist()} <= questions and len(np.unique(inputs[:, 0], axis=0)) == 12
    assert sudoku.is_solved(labels.reshape(-1, 9, 9).astype(int) - 1).all()
    assert np.array_equal(np.where(inputs > 1, labels, 1), inputs)
    for group in range(12):
        boards, answers = (values[group].reshape(4, 9, 9).astype(int) - 1 for values in (inputs, labels))
        assert len(set(forms(boards, answers))) == 1
    other, _ = build.sudokus(section(), folder, 1, silent)
    assert not np.array_equal(stored(other)[0], stored(train)[0]) and other.digest != train.digest


def test_only_hard_ones(table, section):
    folder = table()
    ratings = [int(line.split(",")[3]) for line in Path(folder, "test.csv").read_text().splitlines()[1:]]
    _, test = build.sudokus(section(puzzle_count=2, puzzle_min_difficulty=2), folder, 0, silent)
    assert len(stored(test)[0]) == sum(rating >= 2 for rating in ratings) < 10
    with pytest.raises(DataError, match=r"train.csv: has no puzzles with a rating of at least 999 \(data.puzzle_min_"):
        build.sudokus(section(puzzle_min_difficulty=999), folder, 0, silent)
    with pytest.raises(
        DataError, match=r"data.puzzle_count=31 is more than the 30 puzzles of .*; use --config.data.puzzle_co"
    ):
        build.sudokus(section(puzzle_count=31), folder, 0, silent)


def test_no_augmentations(table, section):
    train, _ = build.sudokus(section(puzzle_augmentations=0), table(), 0, silent)
    assert len(stored(train)[0]) == train.num_examples(81) == 12


def changed(line: int, column: int, text: str):
    """Return a change of a table: what becomes of a line, counted from 1 with the header."""

    def change(rows):
        rows[line - 2][column] = text
        return rows

    return change


def swapped(rows):
    """Two cells of an answer, and of its question where they are clues, hold the same digit."""
    rows[3][1], rows[3][2] = "." * 81, rows[3][2][1:2] + rows[3][2][1:]
    return rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(17, 1, "." * 80), "train.csv:17: question has 80 characters, not 81"),
        (changed(9, 2, "1" * 82), "train.csv:9: answer has 82 characters, not 81"),
        (changed(4, 1, "." * 80 + "x"), "train.csv:4: question has a character that is not one of '.123456789'"),
        (changed(4, 2, "0" * 81), "train.csv:4: answer has a character that is not one of '123456789'"),
        (changed(4, 1, "é" * 81), "train.csv:4: question has a character that is not one of"),
        (changed(6, 2, "1" * 81), "train.csv:6: question contradicts its answer"),
        (swapped, "train.csv:5: answer is not a solved Sudoku"),
        (
            changed(31, 3, "hard"),
            "a number (In CSV column #3: Row #31: CSV conversion error to double: invalid value 'hard'); fix",
        ),
        (changed(31, 3, "nan"), "train.csv:31: rating is not a number"),
        (changed(31, 3, "1,2"), "(CSV parse error: Row #31: Expected 4 columns, got 5: us,"),
    ],
)
def test_a_malformed_row_is_named(table, section, change, message):
    with pytest.raises(DataError) as caught:
        build.sudokus(section(puzzle_count=30), table(change), 0, silent)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "train.csv: not a CSV file with the columns question, answer, rating, the last a number (Empty CSV"),
        (
            b"source,question,answer\n",
            "the last a number (Column 'rating' in include_columns does not exist in CSV file); fix the file",
        ),
        (HEADER.encode() + b"\n", "train.csv: has no puzzle"),
        (b"\xff\xfe", "train.csv: not a CSV file with the columns"),
        (b"question,answer,rating\n12,12," + b"x" * 5000 + b"\n", "the last a number (In CSV column"),
    ],
)
def test_a_table_that_is_none_is_named(table, section, content, message):
    folder = table()
    Path(folder, "train.csv").write_bytes(content)
    with pytest.raises(DataError) as caught:
        build.sudokus(section(), folder, 0, silent)
    assert message in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_missing_files_and_folders_are_named(section, tmp_path):
    with pytest.raises(DataError, match=r"is not a folder; name a folder with train.csv and test.csv"):
        build.sudokus(section(), str(tmp_path / "none"), 0, silent)
    with pytest.raises(DataError, match=r"train.csv: No such file"):
        build.sudokus(section(), str(tmp_path), 0, silent)


@pytest.fixture
def maze_table(tmp_path):
    """Write tables of mazes, with any changes to the first row; return their folder."""

    def write(change=lambda question, answer: (question, answer)):
        folder = tmp_path / "mazes"
        folder.mkdir(exist_ok=True)
        made = maze.draw(np.random.default_rng(0), 6, 30)
        texts = [
            ["".join(maze.CHARACTERS[token - 1] for token in tokens) for tokens in pair]
            for pair in zip(made.questions, made.answers, strict=True)
        ]
        texts[0] = change(*texts[0])
        rows = [
            f'us,"{question}","{answer}",{rating}'
            for (question, answer), rating in zip(texts, made.ratings, strict=True)
        ]
        for name in ("train.csv", "test.csv"):
            (folder / name).write_text("\n".join([HEADER, *rows]))
        return str(folder)

    return write


def test_tables_of_mazes(maze_table, section):
    train, test = build.mazes(section(puzzle_count=6), maze_table(), 0, silent)
    assert (train.num_groups, len(stored(train)[0]), train.vocab_size, train.seq_len) == (6, 48, 6, 900)
    inputs, labels = (values.reshape(6, 8, 30, 30) for values in stored(train))
    np.testing.assert_array_equal(inputs[2], maze.versions(inputs[2, 0]))
    np.testing.assert_array_equal(labels[2], maze.versions(labels[2, 0]))
    assert sorted(map(bytes, inputs[:, 0])) == sorted(map(bytes, stored(test)[0]))
    once, _ = build.mazes(section(puzzle_count=6, puzzle_augmentations=0), maze_table(), 0, silent)
    assert len(stored(once)[0]) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda question, answer: (question.replace("S", " "), answer), "question needs exactly one S"),
        (lambda question, answer: (question.replace("G", "S"), answer), "question needs exactly one S"),
        (lambda question, answer: (question, answer.replace(" ", "#")), "question contradicts its answer"),
        (lambda question, answer: (answer, answer), "question has a character that is not one of '# SG'"),
    ],
)
def test_a_malformed_maze_is_named(maze_table, section, change, message):
    with pytest.raises(DataError) as caught:
        build.mazes(section(puzzle_count=2), maze_table(change), 0, silent)
    assert str(caught.value).endswith(f"csv:2: {message}")


@pytest.mark.parametrize(("side", "augmentations"), [(4, 20), (6, 2), (9, 1)])
def test_no_version_of_a_held_out_sudoku_is_trained_on(section, side, augmentations):
    train, heldout = (30, 20) if side < 9 else (8, 6)  # large boards take long to draw
    options = {
        "puzzle_size": side,
        "puzzle_augmentations": augmentations,
        "puzzle_count": train,
        "puzzle_heldout": heldout,
    }
    sides = build.sudokus(section(**options), "", 0, silent)
    keys = []
    for windows, number in zip(sides, (train * (1 + augmentations), heldout), strict=True):
        boards, answers = (values.reshape(-1, side, side).astype(int) - 1 for values in stored(windows))
        assert len(boards) == number and windows.vocab_size == side + 2
        keys.append(set(forms(boards, answers)))
    assert not keys[0] & keys[1]
    for windows, step in zip(sides, (1 + augmentations, 1), strict=True):
        originals = stored(windows)[0][::step]
        assert len(np.unique(originals, axis=0)) == len(originals)


def test_no_version_of_a_held_out_maze_is_trained_on(section):
    train, test = build.mazes(section(puzzle_size=5), "", 0, silent)
    trained = {board.tobytes() for board in stored(train)[0]}
    assert len(stored(train)[0]) == 12 * 8
    for board in stored(test)[0]:
        assert not {version.tobytes() for version in maze.versions(board.reshape(5, 5))} & trained


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"puzzle_clues": 3},
            "data.puzzle_clues=3: no Sudoku of size 4 with that many clues has one solution; use 0, or 4 to",
        ),
        ({"puzzle_clues": 16}, "use 0, or 4 to 15"),
        (
            {"puzzle_clues": 8, "puzzle_size": 6},
            "change one of data.puzzle_clues (0, or 11 and more), data.puzzle_size",
        ),
        ({"puzzle_min_difficulty": 50}, "are more Sudokus 4 x 4 than there are: found 0 to train on and 0 to hold out"),
        ({"puzzle_size": 5}, "data.puzzle_size=5 is not a size of Sudokus; use one of 4, 6, 9"),
    ],
)
def test_more_than_there_are_is_an_error(section, changes, message, monkeypatch):
    monkeypatch.setattr(drawn, "BARREN_BATCHES", 2)
    with pytest.raises(DataError) as caught:
        build.sudokus(section(**changes), "", 0, silent)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_tables_that_change_while_they_are_read_are_not_kept(section, table, monkeypatch):
    read = build.tables.read

    def read_too_late(file, **options):
        table(lambda rows: rows[::-1])
        return read(file, **options)

    with monkeypatch.context() as patched, pytest.raises(DataError, match="tables: a file changed while it was read"):
        patched.setattr(build.tables, "read", read_too_late)
        build.sudokus(section(), table(), 0, silent)
    train, _ = build.sudokus(section(), table(), 0, silent)
    reversed_rows, _ = build.sudokus(section(), table(lambda rows: rows[::-1]), 0, silent)
    assert train.digest != reversed_rows.digest


def test_counts_that_would_draw_other_puzzles_are_not_advised(section):
    wanted = section(puzzle_size=3, puzzle_count=10, puzzle_heldout=1000)
    with pytest.raises(DataError) as caught:
        build.mazes(wanted, "", 0, silent)
    assert "use fewer, or change one of" in str(caught.value)


def test_all_mazes_of_a_small_side_are_told_apart_and_counted(section):
    with pytest.raises(DataError, match=r"found \d+ to train on and 5 to hold out, of .* forms; use fewer, or change"):
        build.mazes(section(puzzle_size=3, puzzle_count=5000), "", 0, silent)
    with pytest.raises(DataError, match=r"data.puzzle_size=2 is not a size of mazes; use 3 or more"):
        build.mazes(section(puzzle_size=2), "", 0, silent)


@pytest.mark.parametrize("count", [1, 5])
def test_what_is_made_does_not_depend_on_how_many_make_it(section, tmp_path, monkeypatch, count):
    monkeypatch.setattr(drawn, "BATCH", 4)
    one, _ = build.sudokus(section(), "", 7, silent)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: count)
    other, _ = build.sudokus(section(cache_dir=str(tmp_path / "other")), "", 7, silent)
    for values, others in zip(stored(one), stored(other), strict=True):
        np.testing.assert_array_equal(values, others)
    assert one.digest == other.digest


def test_what_was_built_is_found_again(table, section, monkeypatch):
    folder, lines = table(), []
    first, _ = build.sudokus(section(), folder, 0, lines.append)
    assert lines == ["puzzles: 48 in train, 10 in test, with 12 groups in train"]
    monkeypatch.setattr(build, "_build", pytest.fail)
    again, _ = build.sudokus(section(), folder, 0, pytest.fail)
    assert again.digest == first.digest and again.folder == first.folder
    monkeypatch.undo()
    table(lambda rows: rows[::-1])
    other, _ = build.sudokus(section(), folder, 0, silent)
    assert other.digest != first.digest


def test_an_interrupted_build_leaves_nothing(table, section, tmp_path, monkeypatch):
    whole = build.dataset._write_examples

    def interrupted(place, plan, advance):
        whole(place, plan, advance)
        raise KeyboardInterrupt

    monkeypatch.setattr(build.dataset, "_write_examples", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build.sudokus(section(), table(), 0, silent)
    assert [path.suffix for path in (tmp_path / "cache" / "puzzles").iterdir()] == [".lock"]
    monkeypatch.undo()
    left = next((tmp_path / "cache" / "puzzles").iterdir()).with_suffix(".part")
    (left / "train").mkdir(parents=True)  # of a process that was killed
    train, _ = build.sudokus(section(), table(), 0, silent)
    assert len(stored(train)[0]) == 48 and not left.exists()


def test_a_full_disk_is_an_error(table, section, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(DataError, match=r"No space left on device; the cache must be writable"):
        build.sudokus(section(), table(), 0, silent)


def test_several_that_ask_at_once_build_once(table, section, monkeypatch):
    folder, data, begun, build_one = table(), section(), [], build._build

    def counted(*arguments):
        begun.append(threading.get_ident())
        build_one(*arguments)

    monkeypatch.setattr(build, "_build", counted)
    with ThreadPoolExecutor(4) as together:
        found = list(together.map(lambda _: build.sudokus(data, folder, 0, silent)[0].digest, range(4)))
    assert len(begun) == 1 and len(set(found)) == 1


def test_a_corpus_of_puzzles(section):
    arguments = {"vocab_size_typed": False, "announce": silent}
    corpus = prepare(section(), vocab_size=6, **arguments)
    (train,) = corpus.train.parts
    assert corpus.names == ("sudoku",) and corpus.tokenizer is None and corpus.digest == train.digest
    assert corpus.train.num_examples(16) == 12 and corpus.heldout.num_examples(16) == 5
    published = prepare(section(source="puzzles", path=str(train.folder)), vocab_size=9, **arguments)
    assert published.names == (str(train.folder),) and published.digest != ""
    same = [one.train.read(np.arange(30), 16, seed=1) for one in (corpus, published)]
    assert all(np.array_equal(same[0][key], same[1][key]) for key in same[0])
    evaluated = prepare_to_evaluate(section(), vocab_size=6)
    assert evaluated.digest == corpus.digest and evaluated.heldout.num_examples(16) == 5
    with pytest.raises(DataError, match=r"model.vocab_size=5 is less than the 6 .*; use --config.model.vocab_size=6"):
        prepare(section(), vocab_size=5, **arguments)
    assert prepare(section(source="maze"), vocab_size=6, **arguments).heldout.vocab_size == 6


def test_a_step_is_explained_by_group_and_puzzle(section):
    corpus = prepare(section(), vocab_size=6, vocab_size_typed=False, announce=silent, with_documents=True)
    run = {"step": 0, "examples": 0, "global_batch": 8, "sequence_length": 16, "seed": 3}
    explained = ledger.explain(ledger.new_section(corpus, **run), 2, corpus)
    read = corpus.train.read(np.arange(8, 16), 16, seed=3)["inputs"]
    assert [example.row for example in explained] == list(range(8)) and explained[0].part == "sudoku"
    for example, inputs in zip(explained, read, strict=True):
        (excerpt,) = example.excerpts
        group, puzzle = map(int, re.fullmatch(r"group (\d+), puzzle (\d+), example 0", excerpt.document).groups())
        assert np.array_equal(stored(corpus.train.parts[0])[0][4 * group + puzzle], inputs)
