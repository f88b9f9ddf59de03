# SPDX-License-Identifier: Apache-2.0
"""A pod without shared storage: the run is in a folder of each worker, resumes there, and is collected by `backup`."""

import json
import re

import pytest

from checkpointing import host_parts
from pods import launch
from tests import groups
from tests.pods.local_pods import LocalPod, small_run, wait_until

MODELS = "~/models"


@pytest.fixture
def two(tmp_path, monkeypatch):
    """A pod of two workers."""
    monkeypatch.setattr(launch, "LOOK_AFTER_SECONDS", 0.5)
    pod = LocalPod(tmp_path, ACCEL="v4-16", WORKDIR=MODELS)
    assert pod.run("create").status == 0
    yield pod
    pod.end()
    groups.end_all()


def saved(pod: LocalPod, worker: int) -> set[int]:
    """Return the steps of a worker's parts of checkpoints."""
    folder = pod.folder / f"worker-{worker}" / "models" / "checkpoints"
    return {int(path.name) for path in folder.glob("*") if path.name.isdecimal()}


def starts(pod: LocalPod) -> list[int]:
    """Return the steps that the run began from."""
    lines = (pod.folder / "worker-0" / "models" / "metrics.jsonl").read_text().splitlines()
    return [line["step"] for line in map(json.loads, lines) if line.get("event") == "start"]


@pytest.mark.slow
def test_a_run_resumes_on_the_workers_disks_and_its_backup_can_be_used_anywhere(two, tmp_path):
    run = small_run(tmp_path, train__steps=100_000, train__save_every=3, mesh__fsdp=8)
    command = ["launch", *[word for word in run if not word.startswith("--config=")], "--config=configs/tiny.py"]
    launched = two.run(*command)
    assert launched.status == 0, launched.stderr
    lost = f"each host keeps its part of the checkpoints in {MODELS}; they are lost with the pod unless BUCKET is set"
    assert launched.stdout.count(lost) == 1
    wait_until(lambda: saved(two, 0) & saved(two, 1), "a checkpoint")
    stopped = two.run("stop")
    assert stopped.status == 0 and stopped.stdout.count("exit status 75") == 2, two.log(0) + two.log(1)
    first = max(saved(two, 0))
    parts = [host_parts.read(two.folder / f"worker-{i}/models/checkpoints/{first}") for i in (0, 1)]
    assert [part["process"] for part in parts] == [0, 1] and not (two.folder / "shared" / "tiny").exists()
    assert two.run(*command).status == 0
    wait_until(lambda: max(saved(two, 0) & saved(two, 1)) > first, "a checkpoint of the resumed run")
    two.run("stop")
    assert starts(two) == [0, first]
    backup = tmp_path / "backup"
    done = two.run("backup", str(backup))
    joined = re.search(r"joined the parts of 2 hosts: checkpoints (\d+)", done.stdout)
    assert done.status == 0 and joined, done.stdout + done.stderr
    assert (backup / "logs" / "train_worker_1.out").is_file() and not (backup / ".parts").exists()
    refused = two.run("backup", str(backup), "--workdir=runs/other")
    assert refused.status == 1 and f"{backup} is the backup of " in refused.stderr, "no two runs in one folder"
    assert two.run("delete").status == 0
    words = ["generate.py", f"--workdir={backup}", "--prompt=1 is", "--max_tokens=3"]
    [(status, out, err)] = groups.finish([groups.start_alone(words, cache=tmp_path / "cache")])
    assert status == 0 and out.startswith("1 is"), err
