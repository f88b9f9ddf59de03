# SPDX-License-Identifier: Apache-2.0
"""Labeled rows in a file: their split into training and held-out rows, and the digest that a resume compares."""

import numpy as np

from input_pipeline.tasks.labeled import split


def test_the_digest_is_that_of_the_rows_and_of_their_split(tmp_path):
    """Rows that a run has trained on may not become held-out ones when it is resumed."""
    file = tmp_path / "rows.csv"
    np.savetxt(file, np.arange(400).reshape(100, 4) % 7 + np.arange(100)[:, None], fmt="%d", delimiter=",")
    (train, heldout), (_, more) = split(file, 0.2), split(file, 0.6)
    assert train.digest == heldout.digest == split(file, 0.2)[0].digest != more.digest
    assert heldout.num_examples(3) < more.num_examples(3)
