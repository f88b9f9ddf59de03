# SPDX-License-Identifier: Apache-2.0
"""The table of what three sizes need on three slices: every one is there, and its sums are right."""

import pytest

from rehearsal import record
from rehearsal.compiler import GIB, Compiled
from tests.support import ROOT


@pytest.fixture
def resources(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import resources

    return resources


def test_each_size_is_rehearsed_on_each_slice_and_its_cost_recorded(resources):
    wanted = {f"{size}_{name}" for size in ("small", "medium", "large") for name in ("v4-8", "v4-32", "v4-64")}
    assert wanted <= {case.name for case in resources.CASES}
    assert {case.name for case in resources.CASES} <= {case.name for case in record.cases()}


def test_a_row_has_what_a_run_and_a_host_need(resources, monkeypatch):
    """10,000 steps of 128 sequences of 1,024 tokens, 0.5 s each, of a state of 3 GiB a chip; 4 chips a host."""
    found = {
        "fits": True, "step_seconds": 0.5, "tokens_per_second": 262_144.0, "mfu": 0.25,
        "exposed_communication_seconds": 0.0125, "hbm_gib": {"total": 5.0, "capacity": 32},
    }  # fmt: skip
    loaded = record.Case("", "large", "v4-32", {"train.steps": 10_000}).load()
    facts = {"state": {"parameters": GIB, "average": 0, "optimizer": 2 * GIB, "carry": 0, "batch": GIB}}
    compiled = Compiled(loaded.config, loaded.topology, facts, None)
    monkeypatch.setattr(resources, "estimate", lambda compiled: found)
    row = resources.cells(loaded, compiled)
    sizes = "500.0 ms", "262,144", "0.250", "5.0", "12.0", "12.5 ms", "1,311 M", "83 min"
    assert row == ("large", "v4-32", "128 × 1024", *sizes) and len(row) == len(resources.COLUMNS)
    found |= {"fits": False, "step_seconds": None, "hbm_gib": {"total": 40.25, "capacity": 32}}
    row = resources.cells(loaded, compiled)
    assert row[3:7] == ("does not fit", "", "", "40.2 of 32") and len(row) == len(resources.COLUMNS)
