# SPDX-License-Identifier: Apache-2.0
"""One verdict on all that a run does: what fits as a step may not fit as an evaluation, or in the memory of a host."""

import dataclasses
import pathlib

import pytest

from configs import topologies
from rehearsal import phases
from rehearsal.compiler import EVALUATION, GIB, Compiled
from settings import loading

STATE = {"parameters": 4 * GIB, "optimizer": 8 * GIB, "extra": 0, "carry": 0, "batch": GIB}


class Display:
    """Compiles nothing: every phase has 4 GiB of weights and as many bytes in all as it is given."""

    def __init__(self, evaluation_gib: float):
        self.total = evaluation_gib * GIB

    def compile_all(self, wanted, what):
        """Yield a program for each call."""
        for index, (config, topology, call) in enumerate(wanted):
            total = self.total if call.name == EVALUATION else 4.5 * GIB
            facts = {"state": {"weights": 4 * GIB}, "total_bytes": total, "out_of_memory": False}
            yield index, Compiled(config, topology, facts, pathlib.Path("unused"))


def rehearsed(evaluation_gib: float = 6.0, on_host_gib: float = 0.0, host_gib: float | None = 407.0, **keys) -> dict:
    config = loading.load("configs/tiny.py", "v4-8", keys).config
    topology = dataclasses.replace(topologies.get("v4-8"), hbm_gib=24, host_gib=host_gib)
    facts = {
        "state": STATE | {"optimizer": (8 - on_host_gib) * GIB}, "frozen": GIB, "on_host": on_host_gib * GIB,
        "total_bytes": 20 * GIB, "out_of_memory": False,
    }  # fmt: skip
    compiled = Compiled(config, topology, facts, pathlib.Path("unused"))
    return phases.rehearse(compiled, {"fits": True}, Display(evaluation_gib))


def row(found: dict, name: str) -> dict:
    return next(row for row in found["phases"] if row["phase"] == name)


def test_state_that_a_program_does_not_take_lies_beside_it():
    """The state has 4 + 8 GiB, a frozen model 1. The evaluation takes 4 of them, so 9 more are in memory with its 6."""
    found = rehearsed()
    assert found["fits"] and row(found, "evaluation")["chip_gib"] == pytest.approx(15)
    assert row(rehearsed(on_host_gib=8), "evaluation")["chip_gib"] == pytest.approx(7), "moments in the host's memory"
    for on_host_gib in (0, 8):
        save = row(rehearsed(on_host_gib=on_host_gib), "save")
        assert save["host_gib"] == pytest.approx(4 * 13 + phases.HOST_GIB)
        assert save["chip_gib"] == pytest.approx(13 - on_host_gib)


@pytest.mark.parametrize(
    ("changes", "misses"),
    [
        ({}, ""), ({"evaluation_gib": 16.0}, "evaluation"), ({"host_gib": 50.0}, "save, restore"),
        ({"host_gib": None}, ""),
    ],
)  # fmt: skip
def test_the_verdict_names_the_phases_that_do_not_fit(changes, misses):
    found = rehearsed(**changes)
    [section] = phases.sections(found)
    assert found["fits"] == (not misses) == (not section.bad)
    assert section.title == (f"DOES NOT FIT: {misses}" if misses else "FITS: every phase of the run")


def test_without_samples_there_is_no_such_phase():
    assert "sample" not in {row["phase"] for row in rehearsed(**{"evaluation.sample_tokens": "0"})["phases"]}
