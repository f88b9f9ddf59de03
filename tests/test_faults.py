# SPDX-License-Identifier: Apache-2.0
"""Real processes are struck, and the run keeps its promises, by the code of benchmarks/faults.py."""

import re
import subprocess
import time

import pytest

from tests import groups, support

ENDS_SECONDS = 15  # after a SIGTERM, on a busy machine
FEW_ROWS = {"train__global_batch": 16}  # in a batch: 64, as in the benchmark, take four times as long
HANG_SECONDS = 6  # nothing is evaluated here, which the benchmark's wait for


@pytest.fixture(scope="module")
def faults():
    """The benchmark, as a module."""
    with support.benchmark("faults") as module:
        yield module


@pytest.fixture
def place(faults, tmp_path):
    """A folder with texts; no process outlives its test."""
    faults.support.write_texts(tmp_path)
    yield tmp_path
    groups.end_all()


@pytest.mark.slow
def test_a_killed_run_goes_on_by_itself_and_ends_as_if_it_had_not_been(faults, place):
    changes = FEW_ROWS | {"train__steps": 100, "data__tokenizer": "byte"}  # no kill while a tokenizer is trained
    found = faults.kill_again_and_again(place, 1, moments=("save",), **changes)  # at each moment in the benchmark
    assert found["kills"] == 1 and found["identical"]


@pytest.mark.slow
def test_the_other_names_the_one_that_hangs_and_in_what(faults, place, monkeypatch):
    """Of two; of four in the benchmark."""
    monkeypatch.setattr(faults, "HANG_SECONDS", HANG_SECONDS)
    case = faults.hang("data", 1, 2)
    changes = FEW_ROWS | {"optimizer__name": "sgd", "train__eval_every": 0, "train__hang_seconds": HANG_SECONDS}
    process, _ = processes = faults.started(place, case.name, count=case.count, faults=case.faults, **changes)
    faults.until_ended(processes)
    assert process.status == 1 and re.search(case.culprit, process.last_line), process.last_line
    log = (place / case.name / "logs" / "train_worker_0.out").read_text()
    assert "most recent call first" in log or "the stacks of this process:" in log


def test_a_terminated_run_saves_within_seconds_and_says_how_to_go_on(faults, place):
    (process,) = faults.started(place, "terminated", faults="sigterm@4", train__steps=100_000, **FEW_ROWS)
    faults.until_ended([process])
    ended = time.monotonic()
    assert process.status == 75 and ended - process.came("^fault: sigterm@4") < ENDS_SECONDS
    step = re.fullmatch(r"saved at step (\d+); run the same command to continue", process.last_line).group(1)
    assert faults.newest(place / "terminated").name == step


def test_of_a_run_that_had_to_be_cut_nothing_is_said(faults, monkeypatch):
    monkeypatch.setattr(faults, "ENDS_SECONDS", 0)
    with (
        subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as sleeper,
        pytest.raises(RuntimeError, match="1 of 1 processes did not end within 0 s"),
    ):
        faults.until_ended([faults.Watched(sleeper)])
    assert sleeper.returncode < 0


def test_a_mistyped_fault_is_told_in_one_line(faults, place):
    (process,) = faults.started(place, "mistyped", faults="hang@4")
    faults.until_ended([process])
    assert process.status == 2 and [line for _, line in process.err if line] == [process.last_line]
    assert process.last_line.startswith("error: --faults: 'hang@4' is not a fault; an example is ")
    assert not (place / "mistyped").exists()
