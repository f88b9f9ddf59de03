# SPDX-License-Identifier: Apache-2.0
"""Deployment and validation: on real processes, and what is made of their answers."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from pods import deploy, hosts, recipes, records, settings, switches
from pods.checks import readiness
from pods.connection import connect
from pods.errors import PodError
from pods.transports import Result
from pods.watch import Worker
from tests.pods.local_pods import LocalPod, alive, committed_clone, small_run
from tests.support import ROOT

SCRIPT = ROOT / "scripts" / "deploy_optimizations.py"
SWITCHES = {
    "ENABLE_OPTIMIZATIONS": True, "ENABLE_TPU_OPT": True, "ENABLE_NEUROPLASTICITY": True, "ENABLE_CAUSAL": True,
    "ENABLE_EVOLUTION": False, "ENABLE_META_LEARNING": True,
}  # fmt: skip


def test_each_switch_sets_its_keys_and_all_are_off_together():
    resolved = switches.resolve({})
    assert resolved.given == SWITCHES and "ENABLE_EVOLUTION" not in resolved.on and len(resolved.on) == 4
    assert resolved.keys["plasticity.method"] == "continual_backprop"
    assert resolved.keys["meta.method"] == "first_order_maml" and "model.attention" not in resolved.keys
    off = switches.resolve({"ENABLE_OPTIMIZATIONS": "no", "ENABLE_EVOLUTION": "on"})
    assert (off.on, off.given["ENABLE_EVOLUTION"], off.keys) == ([], True, {})


@pytest.mark.parametrize("size", ["tiny", "small", "medium", "large"])
def test_every_size_can_have_all_switches(size):
    asked = settings.read([f"--model_size={size}", "--accel=v4-32", "--project=p", "--zone=z"], {})[0]
    assert recipes.resolved_switches(asked).left_out == {}


def test_a_switch_that_a_configuration_cannot_have_is_left_out_and_the_reason_is_said():
    asked = settings.read(["--model_size=small", "--num_experts=8", "--accel=v4-32", "--transport=local"], {})[0]
    found = recipes.resolved_switches(asked)
    assert list(found.left_out) == ["ENABLE_META_LEARNING"] and not found.effective["ENABLE_META_LEARNING"]
    [line] = found.lines()
    assert line.startswith("ENABLE_META_LEARNING=true is left out, since ") and "model.num_experts" in line


@pytest.mark.parametrize("word", ["true", "1", "yes", "ON", "false", "0", "No", "off"])
def test_switches_take_the_usual_words(word):
    given = switches.resolve({"ENABLE_CAUSAL": word}).given
    assert given["ENABLE_CAUSAL"] == (word.lower() in ("true", "1", "yes", "on"))


def test_a_file_of_switches_runs_no_code(tmp_path, monkeypatch):
    """`arguments` in the file, which an earlier version passed to train.py, are not read; a typed recipe is."""
    (tmp_path / "c.json").write_text(json.dumps({"arguments": ["--config=evil.py"]}))
    monkeypatch.chdir(tmp_path)
    assert deploy.resolve(["deploy", "--config=c.json"], "")[1][0] == f"--config={ROOT}/configs/medium.py"
    words = deploy.resolve(["deploy", "--config=c.json", "--config=configs/tiny.py", "--config.train.steps=3"], "")[1]
    assert (words[0], words[-1]) == ("--config=configs/tiny.py", "--config.train.steps=3")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"switches": 3}', "switches: should be an object, but is 3"),
        ("[" * 100_000, "is not valid JSON (recursion limit exceeded"),
        ("[]", "should be an object, but is []"),
        ('{"switches": {"enable_causal": []}}', "switches.enable_causal"),
        ('{"enable_causal": {}}', "ENABLE_CAUSAL={} is neither true nor false"),
        ('{"model_size": 3}', "model_size: should be a valid string"),
        ('{"sequence_length": 1e300}', "sequence_length: should be a valid integer"),
        ('{"num_experts": 99999999999999999999}', "num_experts: should be less than"),
    ],
)
def test_a_file_of_switches_that_is_none_is_refused_by_its_key(tmp_path, content, message):
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(PodError) as error:
        deploy.resolve(["deploy", f"--config={tmp_path}/c.json"], "")
    assert error.value.exit_status == 2 and message in str(error.value) and len(str(error.value)) < 400


def of_switches(*names: str) -> list[str]:
    """Return the arguments of train.py for the keys of these switches."""
    return [f"--config.{key}={value}" for name in names for key, value in switches.SWITCHES[name].items()]


def test_flags_of_the_deployment_and_its_file(tmp_path, monkeypatch):
    """A file's false is never turned on by flags that are absent; a flag turns off what the file has on."""
    (tmp_path / "c.json").write_text(
        json.dumps({"model_size": "large", "enable_evolution": False, "enable_tpu_opt": False, "ENABLE_CAUSAL": True})
    )
    monkeypatch.chdir(tmp_path)
    flags = ("--config=c.json", "--disable-meta-learning", "--num-experts=16", "--evolution-trials=3")
    resolved, words, search_steps, ahead = deploy.resolve(["deploy", *flags], "")
    assert not ahead
    assert resolved.given == SWITCHES | {"ENABLE_TPU_OPT": False, "ENABLE_META_LEARNING": False}
    assert search_steps == 3 * 200
    assert words == [
        f"--config={ROOT}/configs/large_moe.py", *of_switches("ENABLE_NEUROPLASTICITY", "ENABLE_CAUSAL"),
        "--config.model.num_experts=16",
    ]  # fmt: skip
    flags = ("--model-size=small", "--sequence-length=64", "--disable-neuroplasticity", "--topology=v4-8", "--ahead")
    resolved, words, search_steps, ahead = deploy.resolve(["deploy", *flags], "")
    assert ahead and resolved.given == SWITCHES | {"ENABLE_NEUROPLASTICITY": False}
    assert words == [
        f"--config={ROOT}/configs/small.py",
        *of_switches("ENABLE_TPU_OPT", "ENABLE_CAUSAL", "ENABLE_META_LEARNING"),
        "--config.train.sequence_length=64", "--topology=v4-8",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model-size=huge"], "--model-size=huge: value should be one of"),
        (["--config=nowhere.json"], "nowhere.json: No such file"),
        (["--modelsize=small"], "modelsize"),
        (["--config=a.json", "--config=b.json"], "--config=b.json: give one recipe and one JSON file at most"),
        (["--config=evil.json"], "evil.json: model_size=../HERE/evil is not a recipe of configs/; use"),
    ],
)
def test_mistakes_of_the_deployment_are_one_line(tmp_path, flags, message):
    evil = os.path.relpath(tmp_path / "evil", ROOT / "configs")
    (tmp_path / "evil.json").write_text(json.dumps({"model_size": evil, "arguments": [f"--config={tmp_path}/evil.py"]}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    done = subprocess.run([sys.executable, SCRIPT, *flags], cwd=tmp_path, capture_output=True, text=True)
    assert not (tmp_path / "ran").exists()
    message = message.replace("../HERE/evil", evil)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A pod of two workers of a clone without uncommitted changes, with a data set of their own."""
    folder = tmp_path_factory.mktemp("pair")
    pod = LocalPod(folder, code=committed_clone(folder), ENABLE_CAUSAL="false", ENABLE_EVOLUTION="true")
    (pod.code / ".venv").symlink_to(ROOT / ".venv")
    assert pod.run("create", "--workers=2", ACCEL="v4-8").status == 0
    yield pod
    pod.end()


@pytest.mark.slow
def test_deployment_measures_the_step_on_every_host_and_reports_exactly_the_switches(pair, tmp_path):
    done = pair.run("setup_optimizations", *small_run(tmp_path))
    assert done.status == 0, done.stderr
    for worker in (0, 1):
        report = json.loads((pair.code_of(worker) / "optimization_deployment_report.json").read_text())
        assert report["switches"]["given"] == SWITCHES | {"ENABLE_CAUSAL": False, "ENABLE_EVOLUTION": True}
        on = ["ENABLE_TPU_OPT", "ENABLE_NEUROPLASTICITY", "ENABLE_EVOLUTION", "ENABLE_META_LEARNING"]
        assert report["switches"]["on"] == on and report["switches"]["cost"].keys() == set(on)
        assert report["switches"]["cost"]["ENABLE_NEUROPLASTICITY"].keys() == {"step_seconds", "memory_gib_per_device"}
        assert report["switches"]["cost"]["ENABLE_EVOLUTION"]["search_seconds"] > 0
        assert (report["process"], report["num_processes"], report["num_devices"]) == (worker, 2, 4)
        assert report["mesh"]["fsdp"] == 4 and report["config"]["batch.fit"] == "auto"
        assert report["compile_seconds"] > 0 and report["tokens_per_second"] > 0
        assert report["memory_gib_per_device"] > 0 and len(report["losses"]) == 3
        assert report["launch"]["step_seconds"] > 0  # the same step without switches
        assert (
            report["commit"]
            == subprocess.check_output(["git", "-C", pair.code, "rev-parse", "HEAD"], text=True).strip()
        )

    rehearsed = json.loads((pair.code_of(0) / deploy.REPORT).read_text())["rehearsed"]
    assert rehearsed["ways"].keys() == {"naive", "launch", "ENABLE_TPU_OPT", "launch_optimized"}
    assert all(way["step_seconds"] > 0 and way["memory_gib_per_device"] > 0 for way in rehearsed["ways"].values())
    assert rehearsed["ways"]["launch"] == rehearsed["ways"]["ENABLE_TPU_OPT"]  # never slower: it is the same program
    assert [each["baseline"] for each in rehearsed["factors"]["launch_optimized"]] == ["naive", "launch"]
    assert rehearsed["factors"]["ENABLE_TPU_OPT"][0]["times_less_memory"] > 1


HOLDS = "import time; print('ready', flush=True); time.sleep(600)"


@pytest.mark.slow
def test_on_a_busy_pod_all_that_needs_no_device_is_checked_and_the_run_goes_on(pair, tmp_path):
    """The guide's order for a live pod: setup_optimizations, validate and only then stop."""
    flags = small_run(tmp_path)
    only = {"ENABLE_NEUROPLASTICITY": "false", "ENABLE_META_LEARNING": "false", "ENABLE_EVOLUTION": "false"}
    assert pair.run("launch", "--", "python", "-c", HOLDS).status == 0
    try:
        done = pair.run("setup_optimizations", *flags, **only)
        assert done.status == 0 and f"{deploy.WAITS}, because a run holds the devices of workers 0, 1" in done.stdout
        report = json.loads((pair.code_of(0) / deploy.REPORT).read_text())
        assert report["measured"] == deploy.WAITS and "step_seconds" not in report
        assert report["rehearsed"]["ways"]["launch_optimized"]["step_seconds"] > 0
        assert report["switches"]["cost"] == {"ENABLE_TPU_OPT": {"step_seconds": 0, "memory_gib_per_device": 0}}
        done = pair.run("validate", *flags, **only)
        assert done.status == 0, done.stderr
        page = (pair.folder / "READINESS.md").read_text()
        assert page.startswith("# mine is checked in part; the rest waits for a free pod")
        rows = {row.split(" | ")[0].lstrip("| "): row.split(" | ")[1:] for row in page.splitlines()}
        for item in ("code", "versions", "data", "storage", "cost", "compilation"):
            assert rows[item][0] == "yes", item
        for item in readiness.NEED_DEVICES:
            assert rows[item][0] == "waits" and rows[item][1].startswith(deploy.WAITS), item
        assert "by the TPU compiler: " in rows["compilation"][1] and "fsdp=4" in rows["mesh"][1]
        assert all(map(alive, pair.groups())) and len(pair.groups()) == 2
    finally:
        assert pair.run("stop", "--grace_seconds=1").stdout.count("stopped") == 2


def test_interrupted_three_steps_are_stopped_before_their_folder_is_removed(capfd):
    asked = []

    class Pod:
        num_workers = 2

        def run_each(self, command, together):
            raise KeyboardInterrupt

        def run(self, command, show):
            asked.append(command)

    given = found().settings
    with pytest.raises(KeyboardInterrupt):
        readiness._three_steps(given, Pod(), [], "/shared/run-readiness-1")
    stopping, removal = asked
    assert stopping == hosts.stop(given, for_good=False) and "rm -rf /shared/run-readiness-1" in removal
    assert "stopping the three steps\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("item", "changes", "evidence"),
    [
        ("compilation", {"rehearsed": {"fits": False, "memory_gib_per_device": 40.0}}, "does not fit, it needs 40 GiB"),
        ("compilation", {"rehearsed": {"error": "the mesh does not divide"}}, "the mesh does not divide"),
        ("versions", {"not_as_locked": ["jax 2 (locked: 1)"]}, "worker 0: jax 2 (locked: 1)"),
        ("data", {"corpus": "other"}, "corpus of worker 1 differs"),
    ],
)
def test_what_fails_without_devices_is_no_matter_of_waiting(item, changes, evidence):
    figures = {"fits": True, "step_seconds": 0.1, "memory_gib_per_device": 2.0, "mesh": {"fsdp": 16}}
    check = {"versions": {"jax": "1"}, "not_as_locked": [], "corpus": "abc", "corpus_tokens": 10, "rehearsed": None}
    well = [check | {"rehearsed": figures}, check]
    assert readiness.judge(item, found(checks=well, busy=[0, 1])).ready
    failed = readiness.judge(item, found(checks=[well[0] | changes, check], busy=[0, 1]))
    assert failed.ready is False and evidence in failed.evidence
    assert readiness.judge("3-step run", found(checks=well, busy=[0])).ready is None
    lost = readiness.judge("processes", found(checks=[well[0], None], busy=[0]))
    assert lost.ready is False and "worker 1: out of memory" in lost.evidence


@pytest.mark.slow
def test_validation_trains_and_restores_on_all_hosts_and_finds_what_differs(pair, tmp_path):
    """By the script, on a pod of its own; then on one with a host with other code; then where it cannot start."""
    flags = small_run(tmp_path)
    script = ["bash", "scripts/validate_optimizations.sh", "--accel=v4-8", "--workers=2", *flags]
    scripted = {"cwd": pair.code, "env": pair.environment, "capture_output": True, "text": True}
    (tmp_path / "runs").mkdir()
    done = subprocess.run([*script, f"--workdir={tmp_path}/runs/mine"], **scripted)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (pair.code / "runs" / "READINESS.md").read_text()
    assert page.startswith("# validation is ready") and page.count("| yes |") == len(readiness.ITEMS) == 12
    assert "v4-8, local, configs/tiny.py; " in page  # what was asked for, and not the script's defaults
    assert "2 processes, each sees 4 devices" in page and "restored, continued to step 4" in page
    assert "| full matrix units | not judged |" in page and "| fixed shapes | holds |" in page
    apart = "| one reduction of gradients | DOES NOT HOLD | "  # meta-learning: tasks, and then the other rows
    assert apart in page and re.search(r"of (1\.9\d|2\.0\d) times the gradient", page)
    assert list((tmp_path / "runs").iterdir()) == []  # nothing of it stays
    with (pair.code_of(1) / "core/assembly.py").open("a") as file:
        file.write("# changed\n")
    done = pair.run("validate", *flags)
    assert done.status == 1 and len(done.stderr.splitlines()) == 1
    assert "code: worker 1 has 1 changed files" in done.last_line and "core/assembly.py" in done.last_line
    assert "| **no** |" in (pair.folder / "READINESS.md").read_text()
    (pair.code / "scripts" / "check_host.py").write_text("import nothing_of_the_kind\n")
    done = subprocess.run(script, **scripted)
    assert done.returncode == 1 and "error: validation is not ready: " in done.stderr
    assert "validation is NOT ready" in (pair.code / "runs" / "READINESS.md").read_text()


STAND_IN = """#!/bin/bash
name=$NAME
for word; do [[ $word == --name=* ]] && name=${word#--name=}; done
case $2 in
  create) mkdir "$POD_ROOT/$name" ;;
  validate) echo "$name is ready" >"$POD_ROOT/$name/READINESS.md" ;;
  delete) echo "$name" >>deleted ;;
esac
"""


@pytest.mark.parametrize(("flags", "name"), [([], "validation"), (["--name=mine"], "mine")])
def test_the_script_keeps_the_report_of_a_pod_of_any_name_and_deletes_it(tmp_path, flags, name):
    for folder in ("scripts", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    script = shutil.copy(ROOT / "scripts" / "validate_optimizations.sh", tmp_path / "scripts")
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    done = subprocess.run(["bash", script, *flags], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "kept as runs/READINESS.md\n", "")
    assert (tmp_path / "runs" / "READINESS.md").read_text() == f"{name} is ready\n"
    assert (tmp_path / "deleted").read_text() == f"{name}\n"


CHECK = {
    "process": 0, "num_processes": 2, "num_devices": 16, "local_devices": 8, "device_kind": "TPU v4",
    "simulated": False, "versions": {"jax": "1"}, "not_as_locked": [], "mesh": {"fsdp": 16}, "corpus": "abc",
    "corpus_tokens": 1000, "starts": [0, 3], "heartbeat": True, "log": True,
    "points": [],
    "trained": [
        {"step": n, "loss": 4.0, "step_seconds": 0.36, "tokens_per_second": 9.0, "mfu": 0.4, "goodput": 0.9}
        for n in (1, 2, 3, 4)
    ],
}  # fmt: skip
COMMIT = "c" * 40


def found(workdir: str = "gs://bucket/run", second: dict | None = None, **changes) -> readiness.Found:
    asked, _ = settings.read(["--zone=us-central2-b", "--project=p", "--name=mine"], {})
    checks = [CHECK, CHECK | {"process": 1} | (second or {})]
    values = {
        "settings": asked, "pod": {"state": "READY", "health": "HEALTHY"}, "switches": switches.resolve({}),
        "workers": [Worker(n, commit=COMMIT) for n in (0, 1)], "workdir": workdir,
        "outputs": [Result(0, 0, ""), Result(1, 1, "error: out of memory\n")], "checks": checks,
    }  # fmt: skip
    return readiness.Found(**(values | changes))


@pytest.mark.parametrize(
    ("item", "changes", "evidence"),
    [
        ("hardware", {"second": {"local_devices": 4}}, "12 devices where v4-32 has 16 chips"),
        ("hardware", {"pod": {"state": "PREEMPTED"}}, "the pod is PREEMPTED"),
        ("processes", {"second": {"num_processes": 1, "num_devices": 8}}, "worker 1 sees 1 processes, 8 devices"),
        ("processes", {"checks": [CHECK, None]}, "worker 1: out of memory"),
        ("versions", {"second": {"versions": {"jax": "2"}}}, "versions of worker 1 differs from worker 0"),
        ("versions", {"second": {"not_as_locked": ["jax 2 (locked: 1)"]}}, "worker 1: jax 2 (locked: 1)"),
        ("code", {"workers": [Worker(0, commit="d" * 40)]}, f"worker 0 has commit {'d' * 12}, this clone"),
        ("code", {"workers": [Worker(0, commit=COMMIT, changed=2)]}, "worker 0 has 2 changed files"),
        ("mesh", {"second": {"mesh": {"data": 16}}}, "mesh of worker 1 differs from worker 0"),
        ("data", {"second": {"corpus": "xyz"}}, "corpus of worker 1 differs from worker 0"),
        ("3-step run", {"checks": [CHECK | {"trained": [{"loss": None}]}]}, "losses [None]"),
        ("checkpoint", {"checks": [CHECK | {"starts": [0, 0]}]}, "starts [0, 0]"),
        ("metrics and logs", {"second": {"log": False}}, "worker 1 writes no log"),
        ("monitoring and recovery", {"second": {"heartbeat": False}}, "worker 1 wrote no heartbeat"),
    ],
)  # fmt: skip
def test_each_item_can_fail_and_says_where(monkeypatch, item, changes, evidence):
    monkeypatch.setattr(records, "code_state", lambda: (COMMIT, []))
    well = readiness.judge(item, found())
    assert well.ready, well
    failed = readiness.judge(item, found(**changes))
    assert not failed.ready and evidence in failed.evidence


def test_code_that_git_tells_nothing_of_is_not_ready(monkeypatch):
    monkeypatch.setattr(records, "code_state", lambda: ("", []))
    item = readiness.judge("code", found(workers=[Worker(0, commit="")]))
    assert not item.ready and item.evidence == "the code here is not a git clone with a commit"


def test_a_status_that_git_does_not_give_is_no_clean_one(monkeypatch):
    answers = {"rev-parse": (0, COMMIT, ""), "status": (128, "", "fatal: index file corrupt\n")}
    monkeypatch.setattr(records, "git", lambda *words: subprocess.CompletedProcess(words, *answers[words[0]]))
    with pytest.raises(PodError, match=r"git status in .*: fatal: index file corrupt"):
        records.code_state()


def test_uncommitted_changes_here_are_not_ready(monkeypatch):
    monkeypatch.setattr(records, "code_state", lambda: (COMMIT, ["train.py"]))
    assert readiness.judge("code", found()).evidence == "1 uncommitted changes here, such as train.py"


@pytest.mark.parametrize(
    ("location", "statuses", "ready", "evidence"),
    [
        ("US-CENTRAL2", (0, 0, 0), True, "gs://bucket in us-central2, with the pod"),
        ("US", (0, 0, 0), True, "gs://bucket in us"),
        ("EUROPE-WEST4", (0, 0, 0), False, "gs://bucket is in europe-west4, the pod in us-central2"),
        ("EU", (0, 0, 0), False, "gs://bucket is in eu, the pod in us-central2"),
        ("NAM4", (0, 0, 0), False, "gs://bucket is in nam4, the pod in us-central2"),
        ("US", (1, 0, 0), False, "US"),
        ("US", (0, 1, 0), False, "gs://bucket: US"),
    ],
)
def test_the_bucket_has_to_be_there_near_and_writable(monkeypatch, location, statuses, ready, evidence):
    answers = iter(statuses)
    monkeypatch.setattr(readiness, "storage", lambda *_: Result(None, next(answers), location + "\n"))
    item = readiness.judge("storage", found())
    assert item.ready == ready and evidence in item.evidence


@pytest.mark.parametrize(
    ("workdir", "near"), [("gs://bucket/run", True), ("gs://bucket/run", False), ("/shared/run", False)]
)
def test_the_bucket_of_the_data_has_to_be_near_too(monkeypatch, workdir, near):
    places = {"gs://bucket": "US-CENTRAL2", "gs://texts": "US-CENTRAL2" if near else "EUROPE-WEST4"}
    monkeypatch.setattr(
        readiness,
        "storage",
        lambda _, words: Result(None, 0, places.get(words[2] if len(words) > 2 else "", "") + "\n"),
    )
    item = readiness.judge("storage", found(workdir, data=["gs://bucket", "gs://texts"]))
    assert item.ready == near
    wrong, said = "gs://texts is in europe-west4, the pod in us-central2", "data in gs://texts, in us-central2"
    assert (said if near else wrong) in item.evidence


def test_the_buckets_of_data_are_those_of_the_configuration():
    typed = ["--config=configs/tiny.py", "--config.data.mixture=0.7 gs://one/a/*.txt; 0.3 gs://two/b.jsonl"]
    assert recipes.buckets_of_data([*typed, "--config.data.tokenizer=gs://one/t.model"]) == ["gs://one", "gs://two"]
    assert recipes.buckets_of_data(["--config=configs/tiny.py"]) == []


def test_a_price_of_nothing_is_a_price():
    """As that of a grant."""
    free, _ = settings.read(["--zone=us-central2-b", "--project=p", "--price=0"], {})
    item = readiness.judge("cost", found(settings=free))
    assert item.evidence == "$0.00 an hour for 16 chips at $0.00 (as given); $0.00 for 1,000 steps of 0.360 s"


def test_what_it_costs_by_the_measured_step():
    assert readiness.judge("cost", found()).evidence == (
        "$51.52 an hour for 16 chips at $3.22 (2025-11); $5.15 for 1,000 steps of 0.360 s"
    )
    failed = readiness.judge("cost", found(checks=[None, None])).evidence
    assert failed.endswith("the number of hours is unknown, because no step was measured")


def test_without_a_pod_there_is_nothing_to_validate(tmp_path):
    without, _ = settings.read(["--transport=local", f"--pod_root={tmp_path}"], {})
    with pytest.raises(PodError, match="there is no pod"):
        readiness.validate(without, connect(without), [])
