# SPDX-License-Identifier: Apache-2.0
"""What status and metrics make of what workers and metrics.jsonl say."""

import dataclasses
import json
import os
import re
import signal
import threading
import time
import types
from unittest import mock

import pytest

from pods import launch, records, settings, watch
from pods.errors import PodError
from pods.transports import Result
from pods.watch import Worker
from tests.pods.local_pods import LocalPod

START = 1_700_000_000.0


def train(step: int, seconds: float, **figures) -> dict:
    """Return a line of metrics.jsonl, written `seconds` after the run began."""
    known = {"loss": 4.0, "step_seconds": 2.0, "tokens_per_second": 100.0, "mfu": 0.4, "goodput": 0.9}
    return {"kind": "train", "step": step, "time": START + seconds} | known | figures


def start(step: int, seconds: float) -> dict:
    return {"kind": "event", "event": "start", "step": step, "time": START + seconds}


RUN = [
    start(0, 0),
    train(10, 100),
    train(20, 200),
    train(30, 300),  # lost: the second process began at 20 again, two hours later
    start(20, 7500),
    train(30, 7600, loss=3.0, step_seconds=4.0, mfu=0.5),
    {"kind": "eval", "step": 30, "eval_loss": 3.5, "eval_tokens": 10, "time": START + 7650},
    train(40, 8400, loss=2.5, step_seconds=5.0, tokens_per_second=123.0, mfu=0.45, goodput=0.8),
]


def test_figures_of_a_run_that_was_taken_up_again():
    figures = watch.summarise(RUN, 100, 16, 3.0)
    assert figures == {
        "step": 40, "steps": 100, "loss": 2.5, "eval_loss": 3.5, "tokens_per_second": 123.0, "mfu": 0.45,
        "goodput": 0.8,
        "seconds_left": 60 * 3.0,  # the median of 2, 2, 4 and 5 seconds a step; step 30 counts as it was done last
        "hours": pytest.approx((300 + 900) / 3600),  # without the time between the processes
        "chip_hours": pytest.approx(16 / 3), "cost_dollars": pytest.approx(16.0),
    }  # fmt: skip


def test_figures_of_abandoned_steps_are_not_those_of_the_run():
    lost = {"kind": "eval", "step": 60, "eval_loss": 1.0, "time": START + 8500}
    figures = watch.summarise([*RUN, train(60, 8500, loss=1.0), lost, start(40, 9000)], 100, 16, 3.0)
    assert (figures["step"], figures["loss"], figures["eval_loss"]) == (40, 2.5, 3.5)


@pytest.mark.parametrize(
    ("launched", "seconds"),
    [(7400, 1200 + 100), (100, 1200), (8400, 1200)],  # before the start; of an earlier process; of one to come
)
def test_the_compilation_of_the_newest_process_counts_where_its_launch_is_known(launched, seconds):
    assert watch.elapsed_seconds(RUN, START + launched) == pytest.approx(seconds)


def test_what_is_not_known_is_none():
    figures = watch.summarise([start(0, 0)], 100, None, None)
    unknown = {"step", "loss", "eval_loss", "tokens_per_second", "mfu", "goodput", "seconds_left", "chip_hours"}
    assert {name for name, value in figures.items() if value is None} == unknown | {"cost_dollars"}
    assert watch.summarise(RUN, 40, 16, None)["cost_dollars"] is None
    assert watch.summarise(RUN, 40, 16, None)["seconds_left"] == 0


def beat(**changes) -> dict:
    return {"step": 7, "phase": "training", "code": "abc", "time": 0.0} | changes


WELL = [Worker(n, alive=True, launched=True, commit="c" * 40, heartbeat=beat(), age=1.0) for n in range(3)]
POD = {"state": "READY", "health": "HEALTHY"}


def with_changed(number: int, **changes) -> list[Worker]:
    return [dataclasses.replace(w, **changes) if w.number == number else w for w in WELL]


@pytest.mark.parametrize(
    ("pod", "workers", "expected"),
    [
        (POD, WELL, []),
        ({"state": "READY"}, WELL, []),
        (None, [], ["there is no pod mine"]),
        ({"state": "PREEMPTED"}, WELL, ["the pod is PREEMPTED"]),
        (POD | {"health": "UNHEALTHY_TENSORFLOW"}, WELL, ["the pod's health is UNHEALTHY_TENSORFLOW"]),
        (POD, [dataclasses.replace(w, alive=False, status=0) for w in WELL], []),
        (POD, [dataclasses.replace(w, alive=False, status=75, launched=False) for w in WELL], []),
        (
            POD, with_changed(1, alive=False, status=137),
            ["worker 1 ended with status 137 (signal 9)",
             "workers differ in whether their process runs: 0: True, 1: False, 2: True"],
        ),
        (POD, with_changed(2, reachable=False, error="timed out"), ["worker 2 is unreachable: timed out"]),
        (POD, with_changed(2, age=700.0), ["worker 2 hangs: step 7 was 700 s ago"]),
        (POD, with_changed(2, age=700.0, heartbeat=beat(phase="saving")), []),
        (POD, with_changed(2, age=3700.0, heartbeat=beat(phase="saving")), ["worker 2 hangs: step 7 was 3700 s ago"]),
        (POD, with_changed(2, age=700.0, heartbeat=beat(phase="compiling")), []),
        (
            POD, with_changed(0, commit="d" * 40),
            [f"workers differ in the commit of their code: 0: {'d' * 12}, 1: {'c' * 12}, 2: {'c' * 12}"],
        ),
        (
            POD, with_changed(0, heartbeat=beat(code="xyz")),
            ["workers differ in the code that runs: 0: xyz, 1: abc, 2: abc"],
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_and_what_is_not_is_not(pod, workers, expected):
    asked, _ = settings.read(["--name=mine", "--transport=local"], {})
    assert watch.problems(asked, pod, workers) == expected


def test_a_worker_that_knows_nothing_of_the_launch_is_a_problem():
    """For example if someone else created the pod again, and only set it up."""
    asked, idle = settings.read([], {})[0], [Worker(0), Worker(1, status=0, launched=True)]
    assert watch.problems(asked, {"state": "READY"}, idle) == []
    assert watch.problems(asked, {"state": "READY"}, idle, launched=True) == [
        "worker 0 does not have the launched program; `restart` launches it"
    ]


def test_a_clock_that_was_set_back_makes_no_hours_negative():
    lines = [{"kind": "event", "event": "start", "time": START + 100}]
    lines += [{"kind": "train", "step": step, "time": START + 40 + 10 * step} for step in (1, 2)]
    assert watch.elapsed_seconds(lines) == pytest.approx(10)


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, '{"kind": 3}', '{"kind": "train"}', '{"train.steps": "x"}'])
def test_a_damaged_file_of_the_run_is_one_line(sleeping, name, content):
    file = sleeping.folder / "shared" / "tiny" / name
    before = file.read_text()
    file.write_text(content if name == "config.json" else "{" + content[1:] + "}\n")
    done = sleeping.run("metrics")
    file.write_text(before)
    assert done.status == 1 and len(done.stderr.splitlines()) == 1
    assert f"{sleeping.folder}/shared/tiny/{name}" in done.last_line and len(done.last_line) < 400


def launched(folder) -> LocalPod:
    """Return a pod of four whose workers sleep."""
    pod = LocalPod(folder, ACCEL="v4-32")
    assert pod.run("create").status == 0
    with mock.patch.object(launch, "LOOK_AFTER_SECONDS", 0.2):
        assert pod.run("launch", "--", "sleep", "600").status == 0
    asked, _ = settings.read([], pod.variables)
    workdir = pod.folder / "shared" / "tiny"
    record = records.read(asked) | {"workdir": str(workdir), "switches": {"on": ["ENABLE_TPU_OPT"], "left_out": {}}}
    records.write(asked, record)
    (workdir / "workers").mkdir(parents=True)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in RUN) + '{"kind": "train", "st')
    (workdir / "config.json").write_text('{"train.steps": 100}')
    return pod


@pytest.fixture(scope="module")
def sleeping(tmp_path_factory):
    """A pod that stays as it is."""
    pod = launched(tmp_path_factory.mktemp("sleeping"))
    yield pod
    pod.end()


def beats(pod: LocalPod) -> LocalPod:
    """Write the heartbeats by hand."""
    for worker in range(4):
        line = beat(step=40 + worker, time=time.time(), host_memory_gib=1.25, device_memory_gib=[2.0, 3.0])
        (pod.folder / "shared" / "tiny" / "workers" / f"{worker}.json").write_text(json.dumps(line))
    return pod


@pytest.fixture
def running(sleeping):
    return beats(sleeping)


def test_status_shows_every_worker_and_what_is_on(running):
    done = running.run("status")
    assert done.status == 0, done.stdout
    assert "pod mine: READY, HEALTHY, v4-32, 4 workers (local)" in done.stdout
    assert "switches on: ENABLE_TPU_OPT; left out: none" in done.stdout
    rows = [line.split("  ") for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert len(rows) == 4
    for worker in range(4):
        cells = [cell.strip() for cell in rows[worker] if cell.strip()]
        assert cells[:3] == [str(worker), "training", str(40 + worker)] and "1.25" in cells and "2.0 3.0" in cells
    assert [worker["heartbeat"]["step"] for worker in running.status()["workers"]] == [40, 41, 42, 43]


@pytest.fixture
def broken(tmp_path):
    """One of whose workers was killed, and another one's folder taken away."""
    pod = beats(launched(tmp_path))
    os.killpg(pod.groups()[2], signal.SIGKILL)
    folder, away = pod.folder / "worker-1" / "torus", tmp_path / "away"
    folder.rename(away)
    yield pod
    away.rename(folder)
    pod.end()


def test_a_dead_and_an_unreachable_worker_hide_no_other(broken):
    done = broken.run("status")
    assert done.status == 1
    assert "PROBLEM: worker 1 is unreachable: " in done.stdout and "there is no ~/torus here" in done.stdout
    assert "PROBLEM: worker 2 died and left no exit status" in done.stdout
    assert [w["process"] for w in broken.status()["workers"]] == ["training", "unreachable", "died", "training"]


def test_of_a_run_in_a_bucket_the_copy_of_the_host_is_read():
    path = watch.heartbeat_path("gs://bucket/runs/mine/tiny")
    cache, _, place = path.partition("/torus/workdirs/")
    assert cache == "${XDG_CACHE_HOME:-$HOME/.cache}"
    assert re.fullmatch(r"[0-9a-f]{12}/mine/tiny/workers/\$W\.json", place)
    assert watch.heartbeat_path("/shared/tiny") == "/shared/tiny/workers/$W.json"


def test_a_heartbeat_of_an_earlier_run_is_none(running):
    file = running.folder / "shared" / "tiny" / "workers" / "0.json"
    file.write_text(json.dumps(beat(time=time.time() - 60)))
    assert running.status()["workers"][0]["heartbeat"] is None


@pytest.mark.parametrize("content", ['{"step": 4', '{"step": 4}', "[1]"])
def test_a_damaged_heartbeat_is_told_with_its_worker(running, content):
    (running.folder / "shared" / "tiny" / "workers" / "1.json").write_text(content)
    done = running.run("status")
    assert done.status == 1 and done.stderr.startswith("error: worker 1 is unreachable: its ")
    assert "PROBLEM: worker 1 is unreachable: its " in done.stdout and "damaged" in done.stdout


def test_without_a_pod_there_is_no_table(tmp_path):
    said = LocalPod(tmp_path, ACCEL="v4-16").run("status").stdout
    assert said.splitlines()[1:] == ["launched: nothing", "PROBLEM: there is no pod mine"]


def test_metrics_of_the_run_as_text_and_json(running):
    done = running.run("metrics")
    assert done.status == 0 and "seconds_left       00:03:00" in done.stdout
    assert "cost_dollars       unknown" in done.stdout  # simulated chips have no price
    priced = running.run("metrics", "--json", "--price=3")
    assert priced.status == 0, priced.stderr
    assert json.loads(priced.stdout)["cost_dollars"] == pytest.approx(16.0), priced.stderr


@pytest.fixture
def study(running):
    """The root of a study, as which the launched program is recorded."""
    asked, _ = settings.read([], running.variables)
    record, root = records.read(asked), running.folder / "shared"
    records.write(asked, record | {"workdir": None, "study": str(root)})
    yield root
    records.write(asked, record)


STUDY = {"trial": "exp01/small", "time": START + 7400.0, "done": 3, "failed": 1, "left": 2}


def test_of_a_study_the_trial_that_runs_is_shown(running, study):
    assert "trial that runs" not in running.run("status").stdout, "there is no study.json yet"
    (study / "study.json").write_text(json.dumps(STUDY | {"workdir": f"{study}/tiny"}))
    done = running.run("status")
    assert done.status == 0, done.stdout
    said = done.stdout.splitlines()
    assert said[1].endswith(f", study {study}")
    assert said[2] == f"trial that runs: exp01/small in {study}/tiny; 3 done, 1 failed, 2 left"
    state = running.status()
    assert [worker["heartbeat"]["step"] for worker in state["workers"]] == [40, 41, 42, 43]
    assert state["launched"]["progress"]["trial"] == "exp01/small"
    figures = json.loads(running.run("metrics", "--json").stdout)
    assert (figures["step"], figures["steps"]) == (40, 100)
    assert figures["hours"] == pytest.approx((1200 + 100) / 3600), "its compilation counts from the trial's start"


def test_between_two_trials_metrics_say_how_the_study_stands(running, study):
    (study / "study.json").write_text(json.dumps(STUDY | {"trial": "", "workdir": ""}))
    done = running.run("metrics")
    line = f"error: no trial runs: study {study}; trial that runs: none; 3 done, 1 failed, 2 left"
    assert (done.status, done.last_line) == (1, line)
    assert [worker["process"] for worker in running.status()["workers"]] == ["running"] * 4


@pytest.mark.parametrize("content", ["{", '{"trial": "x"}', '{"trial": "\\u001b[2J"}'])
def test_a_damaged_file_of_a_study_is_one_line(running, study, content):
    (study / "study.json").write_text(content)
    done = running.run("status")
    assert (done.status, len(done.stderr.splitlines())) == (1, 1) and f"{study}/study.json" in done.last_line


def test_watching_goes_on_until_it_is_ended(running):
    watching = running.start("status", "--watch", "--poll_seconds=0.2")
    silent = threading.Timer(120, watching.kill)  # else one that says nothing more would hang this test
    silent.start()
    seen = 0
    for line in watching.stdout:
        seen += line.startswith("pod mine: READY")
        if seen == 3:
            break
    silent.cancel()
    watching.send_signal(signal.SIGINT)
    watching.communicate(timeout=20)
    assert seen == 3 and watching.returncode == 130


def test_a_run_without_a_step_yet_has_a_phase_and_its_metrics_say_so(tmp_path):
    """It took over a minute until status had a phase, and metrics showed a path twice and a message of cat."""
    answer = {"alive": True, "pid": 7, "status": None, "stopped": False, "now": 9.0, "started": 8.0, "commit": "a" * 40}
    answer |= {"changed": 0, "rss_gib": 1.0, "heartbeat": None}
    result = Result(0, 0, json.dumps(answer))
    assert watch._worker(0, result, {"workdir": "/runs/x"}).process() == "starting"
    assert watch._worker(0, result, {"workdir": None}).process() == "running"  # another program
    for said, line in (
        (
            "cat: /runs/x/metrics.jsonl: No such file or directory",
            "/runs/x has no metrics.jsonl before the first logged step",
        ),
        ("ERROR: (gcloud.storage.cat) The following URLs matched no objects", "/runs/x has no metrics.jsonl before"),
        ("ssh: connection refused", "/runs/x/metrics.jsonl: ssh: connection refused"),
    ):
        transport = types.SimpleNamespace(run=lambda *_, said=said, **__: [Result(0, 1, said)])
        with pytest.raises(PodError, match=re.escape(line)):
            watch._read_run(settings.read([], {})[0], transport, "/runs/x")
