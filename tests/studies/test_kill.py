# SPDX-License-Identifier: Apache-2.0
"""A study whose workers are killed: every trial ends exactly once, with the results of an undisturbed study."""

import json
import os
import pathlib
import signal
import time

import pytest

from tests.studies.conftest import KEYS, ended, needs_optuna, sweep
from tests.test_train import command, finish

pytestmark = needs_optuna
STUDY = ("run", "exp08-ema", "--base=mini", "--workers=2", *KEYS)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that still run."""
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Return whether a process runs; one that has only not been waited for does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def results(folder: pathlib.Path) -> dict[str, object]:
    """Return every figure of a run that does not depend on time, and the digests of its last checkpoint."""
    lines = {}
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["kind"] in ("train", "eval"):
            names = ("loss", "gradient_norm", "learning_rate", "exact_accuracy", "eval_loss", "eval_exact_accuracy")
            lines[line["kind"], line["step"]] = {name: line.get(name) for name in names}
    manifest = folder / "checkpoints" / "60" / "manifest.json"
    files = json.loads(manifest.read_text())["files"]
    arrays = {name: digest for name, digest in files.items() if name.startswith("state/") and name.endswith("/0")}
    assert len(arrays) > 10
    return {"lines": lines, "state": arrays}


@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="children are found in Linux's /proc")
def test_killed_workers_leave_nothing_running_and_the_same_command_ends_each_trial_once(tmp_path):
    began = sweep(tmp_path, *STUDY)
    runs = tmp_path / "runs" / "trm-mini"
    while not list(runs.glob("*/*/checkpoints/*/record.json")):
        assert began.poll() is None, began.communicate()
        time.sleep(0.02)
    workers = children(began.pid)
    trained = [child for worker in workers for child in children(worker)]
    assert len(workers) == 2 and trained
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    status, _, err = ended(began)
    assert status == 75 and "2 workers died (status -9); " in err and "run the same command to continue" in err
    end = time.monotonic() + 5
    while any(map(alive, trained)):
        assert time.monotonic() < end, "a killed worker left train.py running"
        time.sleep(0.02)
    status, out, err = ended(sweep(tmp_path, *STUDY))
    assert status == 0, err
    assert "2 done, 0 failed, 0 left" in out

    import optuna

    study = optuna.load_study(study_name="trm-mini", storage=f"sqlite:///{tmp_path}/studies.db")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2
    places = [pathlib.Path(trial.user_attrs["workdir"]) for trial in study.trials]
    for place, trial in zip(places, study.trials, strict=True):
        keys = [f"--config.{key}={value}" for key, value in trial.user_attrs["changes"].items()]
        recipe, alone = f"--config={trial.user_attrs['recipe']}", tmp_path / "alone" / str(trial.number)
        status, _, err = finish(command("train.py", recipe, f"--workdir={alone}", *keys, cache=tmp_path))
        assert status == 0, err
        assert results(place) == results(alone)
