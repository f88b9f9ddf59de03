# SPDX-License-Identifier: Apache-2.0
"""A study of four trials whose workers are killed; benchmarks/killed_studies.py does it more often, with train.py."""

import os
import pathlib
import random
import signal
import time

import pytest

from tests.studies.conftest import ended, needs_optuna
from tests.studies.test_queue import run, starts, trials_of

pytestmark = [
    needs_optuna,
    pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="children are found in Linux's /proc"),
]


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that still run."""
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Return whether a process runs; one that has only not been waited for does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
def test_killed_workers_leave_nothing_running_and_the_same_command_ends_each_trial_once(tmp_path):
    process = run(tmp_path, seeds=2)
    while not (begun := list(tmp_path.glob("runs/*/*/starts"))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    time.sleep(0.5 * random.Random(0).random())
    workers = children(process.pid)
    programs = [child for worker in workers for child in children(worker)]
    assert len(workers) == 2 and programs
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    status, _, err = ended(process)
    assert status == 1 and "2 workers died (status -9); " in err and "run the same command to continue" in err
    end = time.monotonic() + 5
    while any(map(alive, programs)):
        assert time.monotonic() < end, "a killed worker left its program running"
        time.sleep(0.01)
    status, out, err = ended(run(tmp_path, seeds=2))
    assert status == 0 and "4 done, 0 failed, 0 left" in out, err
    found = trials_of(tmp_path)
    assert [trial.state.name for trial in found] == ["COMPLETE"] * 4, "a killed trial keeps its number"
    assert 4 < sum(map(starts, found)) <= 4 + len(programs) and len(begun) <= len(programs)
    for trial in found:
        assert trial.user_attrs["failures"] == [], "a kill of the worker is not a failure of the trial"
        assert trial.value == float(trial.user_attrs["changes"].get("optimizer.ema_decay", 1.0))
        assert [line["step"] for line in trial.user_attrs["evaluations"]] == list(range(1, 21))
