# SPDX-License-Identifier: Apache-2.0
"""The table of what three sizes need on three slices: every one is there, and its sums are right."""

import json

import pytest

from rehearsal import record
from tests.support import ROOT


@pytest.fixture
def resources(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import resources

    return resources


def test_each_size_has_a_row_on_each_slice_and_one_with_experts(resources):
    rows = [resources.cells(case) for case in resources.cases()]
    sizes = ("small", "medium", "large")
    assert {(size, name) for size in sizes for name in ("v4-8", "v4-32", "v4-64")} <= {row[:2] for row in rows}
    assert {f"{size}_moe" for size in sizes} <= {row[0] for row in rows}
    assert {len(row) for row in rows} == {len(resources.COLUMNS)}


def test_the_page_about_rehearsals_has_the_table(resources):
    page = (ROOT / "docs/rehearsal.md").read_text()
    assert f"| {' | '.join(resources.COLUMNS)} |" in page
    for case in resources.cases():
        assert f"| {' | '.join(resources.cells(case))} |" in page, case.name


def test_a_row_has_what_a_run_and_a_host_need(resources, tmp_path, monkeypatch):
    """10,000 steps of 128 sequences of 1,024 tokens, half a second each, at a quarter of a v4's 275 TFLOP/s."""
    case = record.Case("made_up", "large", "v4-32", {"train.steps": 10_000})
    recorded = {
        "figures": {"step_seconds": 0.5, "hbm_gib": 5.0, "flops_model": 275e12 / 8},
        "not_compared": {"exposed_communication_seconds": 0.0125, "state_gib": 3.0},
    }
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    case.path.write_text(json.dumps(recorded))
    row = "500.0 ms", "262,144", "0.250", "5.0", "12.0", "12.5 ms", "1,311 M", "83 min"
    assert resources.cells(case) == ("large", "v4-32", "128 × 1024", *row)
