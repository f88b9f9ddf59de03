# SPDX-License-Identifier: Apache-2.0
"""Rows of integers with a label, from a file of comma-separated values: a window is a row."""

from pathlib import Path
from types import MappingProxyType

import numpy as np

from input_pipeline.cache import digest
from input_pipeline.errors import DataError
from input_pipeline.reading.records import UNREADABLE
from input_pipeline.tasks.hashes import is_held_out
from input_pipeline.windows import Windows


class LabeledWindows(Windows):
    """Rows of `inputs`, int32 [N, T], with `labels`, int32 [N], -1 in padding; `vocab_size` counts the classes."""

    fills = MappingProxyType({"inputs": 0, "labels": -1})
    batch_exceeds_pass = True

    def __init__(self, rows: np.ndarray, num_classes: int, of_file: str):
        self._rows, self.vocab_size, self.digest = rows, num_classes, of_file
        self.num_documents, self.num_tokens = len(rows), rows[:, :-1].size
        self.largest_input = int(rows[:, :-1].max())

    def num_examples(self, sequence_length: int) -> int:
        """Return the number of rows; DataError if they are not of this length."""
        if (found := self._rows.shape[1] - 1) != sequence_length:
            raise DataError(
                f"train.sequence_length={sequence_length} is not the {found} integers of a row; use "
                f"--config.train.sequence_length={found} --config.model.max_length={found}"
            )
        return len(self._rows)

    def read(self, indices: np.ndarray, sequence_length: int) -> dict[str, np.ndarray]:
        """Return rows of `inputs` and `labels`."""
        rows = self._rows[np.asarray(indices, np.int64)]
        return {"inputs": rows[:, :-1].copy(), "labels": rows[:, -1].copy()}


def split(path: Path, holdout_fraction: float) -> tuple[LabeledWindows, LabeledWindows]:
    """Return the training and the held-out rows of a file, split by the hash of a row, so that copies stay together.

    Each line has integers of 0 or more, separated by commas. The last is the label. Raises DataError if the file has
    something else or too few rows, or if all rows fall on one side.
    """
    try:
        rows = np.loadtxt(path, dtype=np.int32, delimiter=",", ndmin=2, encoding="utf-8-sig")
    except UNREADABLE as error:
        raise DataError(f"{path}: {error}; each line must have integers separated by commas, the label last") from error
    if not rows.size or rows.shape[1] < 2 or rows.min() < 0:
        raise DataError(f"{path}: each line must have integers of 0 or more and a label, separated by commas")
    held_out = np.array([is_held_out(row.tobytes(), holdout_fraction) for row in rows])
    if held_out.all() or not held_out.any():
        raise DataError(f"{path}: {len(rows)} rows are too few for data.holdout_fraction={holdout_fraction}")
    of_split = digest(rows.tobytes() + str(rows.shape).encode() + held_out.tobytes())
    num_classes = int(rows[:, -1].max()) + 1
    train, rest = (LabeledWindows(rows[mask], num_classes, of_split) for mask in (~held_out, held_out))
    return train, rest
