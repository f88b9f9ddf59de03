# SPDX-License-Identifier: Apache-2.0
"""What a run on puzzles answers about its steps."""

import pytest

import train
from core import inspection
from tests.puzzles.test_solving import small_config


@pytest.mark.slow
def test_a_step_of_puzzles_is_told_by_group_puzzle_and_example(tmp_path):
    config = small_config(tmp_path / "cache")
    config.mesh.data = 8
    train.train(config, tmp_path / "run")
    header, *rows = inspection.explain_step(config, tmp_path / "run", tmp_path / "run", 2)
    assert header.split() == ["row", "part", "document", "tokens"]
    assert [row.split()[0] for row in rows] == list("01234567")
    assert all("group " in row and ", puzzle " in row and ", example 0" in row for row in rows)
