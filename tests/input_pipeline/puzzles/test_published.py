# SPDX-License-Identifier: Apache-2.0
"""The data of the published implementation, reproduced: augmentations, encodings, and the order of its examples."""

import numpy as np
import pytest

from input_pipeline.batches import evaluation_batches
from input_pipeline.puzzles import arc, sudoku
from input_pipeline.puzzles.dataset import Split
from input_pipeline.puzzles.dihedral import dihedral, undo
from input_pipeline.puzzles.windows import PuzzleWindows
from tests.input_pipeline.puzzles.reference_order import reference_batches, rows_of


def numbered(published, kind):
    numbers = {name.split("/")[1] for name in published if name.startswith(f"{kind}/")}
    return [f"{kind}/{number}" for number in sorted(filter(str.isdigit, numbers), key=int)]


def test_dihedral(published):
    for number in range(8):
        turned = dihedral(published["dihedral/input"], number)
        np.testing.assert_array_equal(turned, published[f"dihedral/out{number}"])
        np.testing.assert_array_equal(undo(turned, number), published["dihedral/input"])


def test_sudoku_augmentations(published):
    found = numbered(published, "sudoku")
    assert found
    for case in found:
        draws = [published[f"{case}/{name}"] for name in ("transpose", "row_perm", "col_perm", "digit_map")]
        for board in ("question", "answer"):
            made = sudoku.augment(published[f"sudoku/{board}"], *draws)
            np.testing.assert_array_equal(made, published[f"{case}/{board}_out"])


def test_arc_sequences(published):
    found = numbered(published, "arc")
    assert found
    for case in found:
        grids, offset = [published[f"{case}/{name}"] for name in ("input", "output")], published[f"{case}/offset"]
        for place, suffix in ((tuple(offset), ""), ((0, 0), "_no_offset")):
            for name, grid in zip(("input", "output"), grids, strict=True):
                (made,) = arc.encode(grid[None], np.array([place]))
                np.testing.assert_array_equal(made, published[f"{case}/{name}_seq{suffix}"])


def test_arc_crops(published):
    found = numbered(published, "arc_crop")
    assert found
    for case in found:
        grid = arc.crop(published[f"{case}/tokens"])
        assert grid.shape == published[f"{case}/grid"].shape
        np.testing.assert_array_equal(grid, published[f"{case}/grid"])


def test_arc_augmentations(published):
    turn, colours = int(published["arc_aug/dihedral"]), published["arc_aug/colour_map"]
    made = arc.dihedral(colours[published["arc_aug/grid"]], turn)
    np.testing.assert_array_equal(made, published["arc_aug/augmented"])
    np.testing.assert_array_equal(arc.restore(made, turn, colours), published["arc_aug/grid"])


@pytest.fixture
def windows(published, tmp_path):
    """The data set of the loader's figures as windows."""
    disk = {name: published[f"loader/disk/{name}"] for name in ("inputs", "labels", "puzzle_identifiers")}
    groups, puzzles = (published[f"loader/disk/{name}_indices"].astype(np.int64) for name in ("group", "puzzle"))
    metadata = {
        "pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": 256, "seq_len": 4,
        "num_puzzle_identifiers": int(disk["puzzle_identifiers"].max()) + 1,
    }  # fmt: skip
    return PuzzleWindows(Split(tmp_path, metadata, *disk.values(), puzzles, groups), "")


def replicas(published):
    """Return (number of processes, process) of every recorded loader."""
    names = {tuple(name.split("/")[2:4]) for name in published if name.startswith("loader/t")}
    return sorted((int(of.removeprefix("replicas")), int(rank.removeprefix("rank"))) for of, rank in names)


def test_the_published_order_of_training(published, windows):
    groups, puzzles = (published[f"loader/disk/{name}_indices"] for name in ("group", "puzzle"))
    settings = {
        "seed": int(published["loader/seed"]), "epochs": int(published["loader/epochs_per_iter"]),
        "global_batch": int(published["loader/global_batch_size"]),
    }  # fmt: skip
    assert replicas(published)
    for count, process in replicas(published):
        prefix = f"loader/train/replicas{count}/rank{process}/iteration"
        iterations = {int(name.removeprefix(prefix).split("/")[0]) for name in published if name.startswith(prefix)}
        assert iterations
        for iteration in iterations:
            found = reference_batches(groups, puzzles, iteration=iteration, **settings)
            assert len(found) == len(published[f"{prefix}{iteration}/inputs"])
            for number, batch in enumerate(found):
                for name, values in windows.read(rows_of(batch, process, count), 4).items():
                    np.testing.assert_array_equal(values, published[f"{prefix}{iteration}/{name}"][number])


def test_the_published_order_of_evaluation(published, windows):
    size = int(published["loader/global_batch_size"])
    for count, process in replicas(published):
        rows = rows_of(np.arange(size), process, count)
        batches = list(evaluation_batches(windows, sequence_length=4, global_batch=size, rows=rows, num_batches=None))
        prefix = f"loader/test/replicas{count}/rank{process}"
        assert len(batches) == len(published[f"{prefix}/inputs"])
        for number, batch in enumerate(batches):
            for name, values in batch.items():
                np.testing.assert_array_equal(values, published[f"{prefix}/{name}"][number])
