# SPDX-License-Identifier: Apache-2.0
"""Epochs of puzzles: each group once, by one of its puzzles with all examples, for any processes and stops."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from input_pipeline.batches import evaluation_batches, training_batches
from input_pipeline.errors import DataError
from input_pipeline.puzzles import dataset
from input_pipeline.puzzles.dataset import Plan, Split, open_split
from input_pipeline.puzzles.windows import PuzzleEpochs, PuzzleWindows
from tests.input_pipeline.memory import mixture_of_one

SIZES = ([1, 1, 1], [3, 3], [2], [4, 4, 4, 4], [1])  # examples of each puzzle, of each group
EPOCH = 1 + 3 + 2 + 4 + 1
CELLS = 5


@pytest.fixture
def split(tmp_path):
    """A split: the cells of example number n are n + 1, and the first label of each does not count."""
    number = sum(map(sum, SIZES))
    inputs = np.repeat(np.arange(1, number + 1)[:, None], CELLS, axis=1).astype(np.uint8)
    labels = inputs.copy()
    labels[:, 0] = 0
    firsts = np.cumsum([0, *map(sum, SIZES)])
    puzzles = sum(map(len, SIZES))

    def examples(groups):
        rows = slice(firsts[groups.start], firsts[groups.stop])
        return inputs[rows], labels[rows]

    plan = Plan(CELLS, 200, SIZES, examples, np.arange(1, puzzles + 1))
    written = []
    dataset.write(tmp_path / "set", {"train": plan, "test": plan}, ["<blank>", *"abcdefghijk"], written.append)
    assert sum(written) == 2 * 2 * plan.num_examples * CELLS
    return open_split(tmp_path / "set", "train")


def batches(windows, rows, first_example=0, num_steps=9, global_batch=8, seed=3):
    return list(
        training_batches(
            mixture_of_one(windows), seed=seed, sequence_length=CELLS, global_batch=global_batch,
            rows=np.asarray(rows), first_example=first_example, num_steps=num_steps,
        )
    )  # fmt: skip


def joined(parts):
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def test_indices_that_int32_cannot_number_are_wider():
    small, large = dataset.indices_of([3, 1]), dataset.indices_of(np.array([2**31 - 2, 1, 1], np.int32))
    assert (small.dtype, small.tolist()) == (np.int32, [0, 3, 4])
    assert (large.dtype, large.tolist()) == (np.int64, [0, 2**31 - 2, 2**31 - 1, 2**31])


def test_an_epoch_visits_every_group_once_with_all_examples_of_one_puzzle(split):
    windows = PuzzleEpochs(split, "")
    assert windows.num_examples(CELLS) == EPOCH and windows.num_tokens == EPOCH * CELLS
    assert (windows.num_groups, windows.num_documents, windows.num_identifiers) == (5, 11, 12)
    taken = windows.order(np.arange(400 * EPOCH), CELLS, seed=1).reshape(400, EPOCH)
    puzzle_of = np.repeat(np.arange(11), np.diff(split.puzzles))
    group_of = np.repeat(np.arange(5), np.diff(split.groups))
    orders = set()
    for epoch in taken:
        puzzles = list(dict.fromkeys(puzzle_of[epoch].tolist()))
        groups = group_of[puzzles].tolist()
        assert sorted(groups) == [0, 1, 2, 3, 4]
        expected = np.concatenate([np.arange(split.puzzles[puzzle], split.puzzles[puzzle + 1]) for puzzle in puzzles])
        assert np.array_equal(epoch, expected)
        orders.add(tuple(groups))
    assert len(orders) > 100
    drawn = np.bincount(puzzle_of[taken[:, :]].ravel(), minlength=11) / np.diff(split.puzzles)
    assert (np.abs(drawn[:3] - 400 / 3) < 40).all() and (np.abs(drawn[6:10] - 100) < 40).all()


def test_the_order_is_a_pure_function_of_seed_and_number(split):
    windows = PuzzleEpochs(split, "")
    whole = windows.order(np.arange(30 * EPOCH), CELLS, seed=1)
    some = np.random.default_rng(0).permutation(30 * EPOCH)
    assert np.array_equal(PuzzleEpochs(split, "").order(some, CELLS, seed=1), whole[some])
    assert not np.array_equal(windows.order(np.arange(30 * EPOCH), CELLS, seed=2), whole)
    assert windows.order(np.array([10**15]), CELLS, seed=-1).shape == (1,)


def test_a_smaller_puzzle_of_a_group_gives_its_examples_again(split):
    uneven = Split(*(getattr(split, name) for name in ("folder", "metadata", "inputs", "labels")), np.zeros(2, int),
                   np.array([0, 1, 21]), np.array([0, 2]))  # fmt: skip
    windows = PuzzleEpochs(uneven, "")
    assert windows.num_examples(CELLS) == 20
    epochs = windows.order(np.arange(20 * 20), CELLS, seed=0).reshape(20, 20)
    assert {tuple(epoch) for epoch in epochs.tolist()} == {(0,) * 20, tuple(range(1, 21))}


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_read_together_what_one_reads(split, processes):
    windows = PuzzleEpochs(split, "")
    whole = batches(windows, range(8))
    parts = [batches(windows, rows) for rows in np.split(np.arange(8), processes)]
    for step, of_processes in enumerate(zip(*parts, strict=True)):
        found = joined(of_processes)
        assert list(found) == ["inputs", "labels", "puzzle_identifiers"]
        assert all(np.array_equal(found[key], whole[step][key]) for key in found)
    assert whole[0]["inputs"].shape == (8, CELLS) and whole[0]["puzzle_identifiers"].shape == (8,)
    assert all(values.dtype == np.int32 for values in whole[0].values())


@pytest.mark.parametrize("global_batch", [8, 4, 16])
def test_a_stopped_run_goes_on_within_an_epoch(split, global_batch):
    windows = PuzzleEpochs(split, "")
    whole = joined(batches(windows, range(8), num_steps=10))
    rest = batches(windows, range(global_batch), 48, 32 // global_batch, global_batch)
    assert 48 % EPOCH and all(np.array_equal(values, whole[key][48:]) for key, values in joined(rest).items())


def test_a_batch_may_be_larger_than_an_epoch(split):
    (batch,) = batches(PuzzleEpochs(split, ""), range(40), num_steps=1, global_batch=40)
    counts = np.unique(batch["inputs"][:33, 0], return_counts=True)[1]
    assert counts.max() >= 3  # the group of one puzzle with two examples comes in each of three epochs


def test_evaluation_reads_examples_in_order_and_fills_the_last_batch(split):
    windows = PuzzleWindows(split, "")
    number = windows.num_examples(CELLS)
    found = joined(
        list(evaluation_batches(windows, sequence_length=CELLS, global_batch=16, rows=np.arange(16), num_batches=None))
    )
    assert len(found["inputs"]) == 32 > number == 28
    assert np.array_equal(found["inputs"][:number, 1], np.arange(1, number + 1))
    assert np.array_equal(found["labels"][:number, 1:], found["inputs"][:number, 1:])
    assert (found["labels"][:, 0] == -100).all() and (found["labels"][number:] == -100).all()
    assert not found["inputs"][number:].any() and not found["puzzle_identifiers"][number:].any()
    expected = np.repeat(np.arange(1, 12), np.diff(split.puzzles))
    assert np.array_equal(found["puzzle_identifiers"][:number], expected)


def test_a_window_is_named_by_group_puzzle_and_example(split):
    windows = PuzzleEpochs(split, "")
    (piece,) = windows.pieces(7, CELLS)
    assert (piece.document, piece.count) == (7, CELLS)
    assert windows.document_name(7) == "group 1, puzzle 1, example 1 (e)"


def test_wrong_lengths_and_tokens_are_errors(split):
    windows = PuzzleEpochs(split, "")
    with pytest.raises(
        DataError, match=r"train.sequence_length=6 is not the 5 .*; use --config.train.sequence_length=5"
    ):
        windows.num_examples(6)
    split.metadata["vocab_size"] = 9
    with pytest.raises(DataError, match=r"has the token 9, but vocab_size=9"):
        PuzzleWindows(split, "").read(np.arange(28), CELLS)
    with pytest.raises(DataError, match=r"has the token -7, but vocab_size=99"):
        inputs = np.full(split.inputs.shape, -7, np.int8)
        wrong = dataclasses.replace(split, inputs=inputs, metadata=split.metadata | {"vocab_size": 99})
        PuzzleWindows(wrong, "").read(np.arange(2), CELLS)
    with pytest.raises(DataError, match=r"has the token 4294967297, but vocab_size=99"):  # 1 in the first 32 bits
        inputs = np.full(split.inputs.shape, 2**32 + 1, np.int64)
        wrong = dataclasses.replace(split, inputs=inputs, metadata=split.metadata | {"vocab_size": 99})
        PuzzleWindows(wrong, "").read(np.arange(2), CELLS)


def changed(key, value):
    def change(folder):
        metadata = json.loads((folder / "dataset.json").read_text()) | {key: value}
        (folder / "dataset.json").write_text(json.dumps({k: v for k, v in metadata.items() if v is not None}))

    return change


def saved(name, array):
    return lambda folder: np.save(folder / f"all__{name}.npy", array)


def bomb(name):
    """Write a header that says there is a terabyte."""

    def change(folder):
        with (folder / f"all__{name}.npy").open("wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (1 << 20, 1 << 20)}
            np.lib.format.write_array_header_1_0(file, header)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "dataset.json: No such file"),
        (lambda folder: (folder / "dataset.json").write_text("{"), "dataset.json: is not valid JSON"),
        (lambda folder: (folder / "all__labels.npy").unlink(), "all__labels.npy: No such file"),
        (lambda folder: (folder / "all__labels.npy").write_bytes(b"no"), "all__labels.npy: not a readable .npy file"),
        (changed("vocab_size", None), "dataset.json: vocab_size is missing"),
        (changed("sets", ["a", "b"]), "sets=['a', 'b']; name exactly one set"),
        (changed("sets", ["../../x"]), "sets=['../../x']; name exactly one set"),
        (changed("pad_id", 10**6), "pad_id=1000000 is not a token"),
        (changed("seq_len", 2.5), "seq_len: should be a valid integer, but is 2.5"),
        (saved("inputs", np.zeros((28, 5))), "all__inputs.npy: has float64 [28, 5]; it must have whole numbers in 2"),
        (saved("puzzle_identifiers", np.int32(3)), "has int32 []; it must have whole numbers in 1"),
        (bomb("inputs"), "all__inputs.npy: not a readable .npy file (mmap length is greater than file size)"),
        (changed("seq_len", 7), "inputs have the shape (28, 5), in a data set of 28 examples with seq_len=7"),
        (changed("num_puzzle_identifiers", 3), "a puzzle's identifier is 11"),
        (saved("puzzle_indices", np.arange(12)), "puzzle_indices do not ascend from 0 to the number of examples"),
        (saved("group_indices", np.array([0, 0, 11])), "group_indices do not ascend from 0 to the number of puzzles"),
    ],
)
def test_a_damaged_data_set_is_an_error(split, change, message):
    change(split.folder / "train")
    with pytest.raises(DataError) as caught:
        open_split(split.folder, "train")
    assert message in str(caught.value) and "\n" not in str(caught.value)
