# SPDX-License-Identifier: Apache-2.0
import numpy as np

from input_pipeline.puzzles import tables


def test_every_row_is_drawn_as_often_as_another(tmp_path):
    rows = [f"us,{chr(97 + number)},x,{number}" for number in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["source,question,answer,rating", *rows]))
    counts = np.zeros(128)
    for seed in range(600):
        options = {"cells": 1, "least_rating": 4, "count": 5}
        table = tables.read(tmp_path / "t.csv", seed=seed, **options)
        assert len(set(table.rows.tolist())) == 5 and sorted(table.rows) == table.rows.tolist()
        assert (table.questions[:, 0] == 97 + table.rows - 2).all()
        counts[table.questions[:, 0]] += 1
    drawn = counts[counts > 0]
    assert len(drawn) == 16 and counts[101:117].sum() == 3000
    assert np.abs(drawn - 600 * 5 / 16).max() < 4.5 * np.sqrt(600 * 5 / 16 * 11 / 16)
