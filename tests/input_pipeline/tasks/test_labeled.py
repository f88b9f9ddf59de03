# SPDX-License-Identifier: Apache-2.0
"""Labeled rows in a file: their split into training and held-out rows, and the digest that a resume compares."""

import codecs

import numpy as np

from input_pipeline.tasks.labeled import split


def test_the_digest_is_that_of_the_rows_and_of_their_split(tmp_path):
    """Rows that a run has trained on may not become held-out ones when it is resumed."""
    file = tmp_path / "rows.csv"
    np.savetxt(file, np.arange(400).reshape(100, 4) % 7 + np.arange(100)[:, None], fmt="%d", delimiter=",")
    (train, heldout), (_, more) = split(file, 0.2), split(file, 0.6)
    assert train.digest == heldout.digest == split(file, 0.2)[0].digest != more.digest
    assert heldout.num_examples(3) < more.num_examples(3)


def test_a_table_of_a_spreadsheet_begins_with_a_byte_order_mark(tmp_path):
    plain, marked = tmp_path / "plain.csv", tmp_path / "marked.csv"
    np.savetxt(plain, np.arange(400).reshape(100, 4), fmt="%d", delimiter=",")
    marked.write_bytes(codecs.BOM_UTF8 + plain.read_bytes())
    assert split(marked, 0.2)[0].digest == split(plain, 0.2)[0].digest
