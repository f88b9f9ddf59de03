# SPDX-License-Identifier: Apache-2.0
"""A study on four hosts: real processes of sweep.py, whose trials are programs with a real hub and no jax."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from cluster.group import Group
from cluster.hub import RunError
from pods.local import free_port
from studies import pod
from tests.studies.conftest import environment, needs_optuna
from tests.studies.test_kill import alive, children
from tests.support import ROOT

HOSTS, STEPS = 4, 20
SWEEP = """
import os, runpy, sys
from studies import program
program.TRAIN = (sys.executable, sys.argv.pop(1))
if os.environ["JAX_PROCESS_INDEX"] != "0":
    sys.modules["optuna"] = None  # a follower needs none
sys.argv[0] = "sweep.py"
runpy.run_path("sweep.py", run_name="__main__")
"""


@pytest.fixture
def begun():
    """Processes that a test begins; those that it leaves are killed."""
    found = []
    yield found
    for process in found:
        with process:
            process.kill()


STUDY = "run", "exp08-ema", "--base=mini"


def start(begun: list, folder: pathlib.Path, *flags: str, hosts: int = HOSTS, what=STUDY) -> list[subprocess.Popen]:
    """Start the study of two configurations, or another subcommand, on each host."""
    group = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_PROCESS_COUNT": str(hosts)}
    group |= {"TORUS_RUN_SECRET": "a secret of this test"}
    stand_in = str(ROOT / "tests" / "studies" / "pod_stand_in.py")
    words = [*what, "--allow_local"]
    words += [f"--storage=sqlite:///{folder}/studies.db", f"--root={folder}/runs"]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SWEEP, stand_in, *words, f"--config.train.steps={STEPS}", *flags], cwd=ROOT,
            env=environment(folder) | group | {"JAX_PROCESS_INDEX": str(index)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for index in range(hosts)
    ]  # fmt: skip
    begun += started
    return started


def ended(hosts: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Return (status, stdout, stderr) of each process when all have ended."""
    found = [process.communicate(timeout=240) for process in hosts]
    return [(process.returncode, *said) for process, said in zip(hosts, found, strict=True)]


def wait_for_step(folder: pathlib.Path, step: int, *, after: str = "") -> dict:
    """Wait until another trial than `after` has trained that far; return what study.json says then."""
    end = time.monotonic() + 120
    while True:
        assert time.monotonic() < end, f"no trial came to step {step}"
        time.sleep(0.02)
        file = folder / "runs" / "study.json"
        shown = json.loads(file.read_text()) if file.exists() else {"trial": ""}
        metrics = pathlib.Path(shown["workdir"]) / "metrics.jsonl" if shown["trial"] not in ("", after) else file
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            return shown


def test_what_cannot_be_done_on_several_hosts_is_one_line():
    program = """
import sweep
from configs.errors import ConfigError
two = ["run", "exp08-ema", "--allow_local", "--workers=2"]
for words in ["run", "exp08-ema"], two, ["search", "--noallow_local"]:
    try:
        sweep.main(words)
    except ConfigError as error:
        print(error)
"""
    group = {"JAX_COORDINATOR_ADDRESS": "h:9000", "JAX_PROCESS_COUNT": "4", "JAX_PROCESS_INDEX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ | group, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [
        f"--root={ROOT}/runs/trm is a local folder, which the hosts of this group do not share and which is lost with "
        "the pod; use --root=gs://BUCKET/FOLDER, or --allow_local for a mounted folder or a simulation",
        "--workers=2: the 4 hosts train one trial at a time; omit the flag",
        f"--root={ROOT}/runs/searches is a local folder, which the hosts of this group do not share and which is lost "
        "with the pod; use --root=gs://BUCKET/FOLDER, or --allow_local for a mounted folder or a simulation",
    ], done.stderr


def test_a_host_that_cannot_join_ends_with_trials_left():
    port, ends = free_port(), []
    with socket.create_server(("127.0.0.1", port + 2)):
        group = Group("127.0.0.1", port, 0, 2, "")
        pod.join(group, 1.0, lambda line, status: ends.append((line, status)), "gs://bucket/study")
    ((line, status),) = ends
    assert status == 75 and line.startswith(f"port {port + 2} on this machine: Address already in use")
    assert line.endswith("; run the same command to continue")


@pytest.mark.slow
@needs_optuna
def test_a_trial_fails_with_the_process_of_any_host_and_all_hosts_end_alike(begun, tmp_path, monkeypatch):
    monkeypatch.setenv("FAILS", "1")
    left = ended(start(begun, tmp_path, hosts=2))
    assert left[0][0] == 1 and "0 done, 2 failed, 0 left" in left[0][1]
    assert re.fullmatch(
        r"error: 2 trials failed, first [\w/-]+: process 1 of 2 \(.*\): as planned; "
        r"`sweep.py retry` queues them again\n", left[0][2]
    )  # fmt: skip
    assert (left[1][0], left[1][2].splitlines()[-1]) == (1, left[0][2].strip())
    shown = json.loads((tmp_path / "runs" / "study.json").read_text())
    assert (shown["done"], shown["failed"], shown["left"]) == (0, 2, 0)


@pytest.mark.slow
@needs_optuna
def test_a_study_on_a_pod_survives_a_stop_and_a_kill_of_any_host(begun, tmp_path):
    from tests.studies.test_sweep import queue_in

    (hold := tmp_path / "runs" / "hold").parent.mkdir()
    hold.touch()
    hosts = start(begun, tmp_path, hosts=2)
    first = wait_for_step(tmp_path, 5)
    assert (first["done"], first["failed"], first["left"]) == (0, 0, 2)
    hosts[1].send_signal(signal.SIGTERM)
    assert [(status, err) for status, _, err in ended(hosts)] == [
        (75, "interrupted; 2 trials are left, run the same command to continue\n")
    ] * 2

    hosts = start(begun, tmp_path)
    second = wait_for_step(tmp_path, 5, after=first["trial"])
    assert (second["done"], second["left"]) == (1, 1)
    programs = [child for host in hosts for child in children(host.pid)]
    assert len(programs) == HOSTS
    os.kill(hosts[2].pid, signal.SIGKILL)
    left = ended(hosts)
    assert [status for status, *_ in left] == [75, 75, -9, 75]
    for number in (0, 1, 3):
        said = r"(?m)^process 2 of 4 \(.*\) died; run the same command to continue$"  # its program may say so too
        assert len(re.findall(said, left[number][2])) == 1
    end = time.monotonic() + 10
    while any(map(alive, programs)):
        assert time.monotonic() < end, "a host that ended left its program running"
        time.sleep(0.02)

    hold.unlink()
    left = ended(start(begun, tmp_path))
    assert [(status, err) for status, _, err in left] == [(0, "")] * HOSTS
    assert "2 done, 0 failed, 0 left" in left[0][1] and not any(out for _, out, _ in left[1:])
    expected = 0.0
    for step in range(1, STEPS + 1):
        expected += step / 7
    for trial in queue_in(tmp_path, "trm-mini").latest().values():
        folder = pathlib.Path(trial.user_attrs["workdir"])
        assert trial.value == expected, "resumed trials compute what undisturbed ones do"
        assert trial.user_attrs["failures"] == [], "neither a stop nor a kill of a host is a failure of the trial"
        starts = [(folder / f"starts{index}").read_text().split()[-1] for index in range(HOSTS)]
        assert int(starts[0]) >= 4 and len(set(starts)) == 1, "all hosts resume at the same step"
    assert json.loads((tmp_path / "runs" / "study.json").read_text())["trial"] == ""


@pytest.mark.slow
@needs_optuna
def test_a_search_on_a_pod_goes_on_after_a_stop(begun, tmp_path):
    import optuna

    what = "search", "--config=configs/tiny.py", "--method=random", "--trials=3", "--name=s"
    (hold := tmp_path / "runs" / "hold").parent.mkdir()
    hold.touch()
    hosts = start(begun, tmp_path, hosts=2, what=what)
    first = wait_for_step(tmp_path, 5)
    assert (first["done"], first["left"]) == (0, 3)
    hosts[1].send_signal(signal.SIGTERM)
    assert [(status, err.splitlines()[-1]) for status, _, err in ended(hosts)] == [
        (75, "0 of 3 trials have ended; run the same command to continue")
    ] * 2

    hold.unlink()
    left = ended(start(begun, tmp_path, hosts=2, what=what))
    assert [status for status, _, _ in left] == [0, 0] and "s: 3 done, 0 pruned, 0 failed" in left[0][1], left
    found = optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path}/studies.db").trials
    assert [trial.state.name for trial in found] == ["COMPLETE"] * 3
    assert len({trial.user_attrs["digest"] for trial in found}) == 3
    again = (pathlib.Path(found[0].user_attrs["workdir"]) / "starts1").read_text().split()
    assert len(again) == 2 and int(again[1]) >= 5, "the trial that was stopped resumed on host 1 too"
    shown = json.loads((tmp_path / "runs" / "study.json").read_text())
    assert (shown["done"], shown["failed"], shown["left"]) == (3, 0, 0)


@needs_optuna
def test_an_outage_of_the_store_leaves_the_trials_to_the_next_command():
    """The status that supervision does not take for final."""
    from studies import leading

    def outage():
        raise RunError("gs://runs does not answer")

    assert leading.lead(outage) == pod.End(75, "gs://runs does not answer")
