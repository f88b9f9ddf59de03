# SPDX-License-Identifier: Apache-2.0
"""`pod.py create --zones --wait`: what gcloud is asked until a zone has a pod, and what is left of the rest."""

import json
import signal
import subprocess
import sys

import pytest

from pods import capacity, settings
from tests.pods.local_pods import wait_until
from tests.pods.recording import Recorder
from tests.support import ROOT

ZONES = "--zones=us-central2-b,europe-west4-b"


@pytest.fixture
def gcloud(tmp_path):
    return Recorder(tmp_path)


def made(calls: list[list[str]]) -> list[tuple[str, ...]]:
    """Return what was created and deleted: (verb, zone, kind, --spot)."""
    return [
        (argv[3], word.removeprefix("--zone="), argv[2], "--spot" in argv)
        for argv in calls
        for word in argv
        if word.startswith("--zone=") and argv[3] in ("create", "delete")
    ]


def test_each_zone_is_tried_on_demand_spot_and_queued_until_one_has_a_pod(gcloud):
    done = gcloud.run("create", ZONES, "--wait", "--wait_seconds=100", ZONE="-", FAKE_CAPACITY="europe-west4-b:spot")
    assert done.status == 0, done.stderr
    assert made(done.argvs) == [
        ("create", "us-central2-b", "tpu-vm", False), ("create", "us-central2-b", "tpu-vm", True),
        ("create", "us-central2-b", "queued-resources", False), ("delete", "us-central2-b", "queued-resources", False),
        ("create", "europe-west4-b", "tpu-vm", False), ("create", "europe-west4-b", "tpu-vm", True),
    ]  # fmt: skip
    lines = done.stdout.splitlines()
    assert "us-central2-b: trying on demand, queued" in lines and "europe-west4-b: trying spot" in lines
    assert lines[-1] == "torus is ready, spot, in europe-west4-b: export ZONE=europe-west4-b"
    kept = json.loads((gcloud.folder / "pods" / "torus" / "created.json").read_text())
    assert kept["spot"] is True and kept["queued"] is False  # `supervise` makes a preempted one again like this


def test_what_is_typed_narrows_the_ways_and_without_wait_each_is_tried_once(gcloud):
    done = gcloud.run("create", ZONES, "--spot", FAKE_CAPACITY="")
    assert done.status == 1 and "no pod was created; --wait goes on trying. us-central2-b, spot: " in done.last_line
    assert [row for row in made(done.argvs) if row[0] == "create"] == [
        (*row, True) for zone in ("us-central2-b", "europe-west4-b")
        for row in (("create", zone, "tpu-vm"), ("create", zone, "queued-resources"))
    ]  # fmt: skip
    dry = gcloud.run("create", ZONES, "--dry-run")
    assert dry.status == 0 and dry.calls == [] and dry.stdout.count("gcloud compute tpus") == 6


def test_with_wait_all_zones_are_tried_again_but_not_where_it_cannot_succeed(gcloud):
    denied = {"verb": "create torus --zone=europe-west4-b", "status": 1, "stderr": "PERMISSION_DENIED: not yours"}
    full = {"verb": "tpu-vm create torus --zone=us-central2-b", "status": 1, "times": 1}
    failures = json.dumps([denied, full | {"stderr": "There is no more capacity in the zone"}])
    words = ("create", ZONES, "--wait", "--reserved")
    done = gcloud.run(*words, FAKE_CAPACITY="us-central2-b:demand", FAKE_FAILURES=failures)
    assert done.status == 0 and "europe-west4-b: gcloud compute tpus tpu-vm create: PERMISSION_DENIED" in done.stdout
    tries = [zone for verb, zone, kind, _ in made(done.argvs) if (verb, kind) == ("create", "tpu-vm")]
    assert tries == ["us-central2-b", "europe-west4-b", "us-central2-b"]
    assert "no zone gave a pod; trying 3 ways again in 0 s" in done.stdout


def test_where_every_way_has_failed_for_good_none_is_tried_again_or_said_to_be(gcloud):
    denied = json.dumps([{"verb": "create torus", "status": 1, "stderr": "PERMISSION_DENIED: not yours"}])
    for wait in ((), ("--wait",)):
        done = gcloud.run("create", ZONES, *wait, FAKE_CAPACITY="", FAKE_FAILURES=denied)
        assert done.status == 1 and "no pod was created. us-central2-b, on demand: " in done.last_line
        assert " again in " not in done.stdout and len(made(done.argvs)) == 6


def test_what_a_failed_request_may_have_made_is_deleted_and_no_try_begins_after_the_time(gcloud):
    stuck = {"verb": "tpu-vm create torus --zone=us-central2-b", "status": 1, "times": 1}
    stuck["stderr"] = "The operation has not finished in 1800 seconds. It may still be underway"
    capacity = "us-central2-b:demand europe-west4-b:spot"
    done = gcloud.run("create", ZONES, FAKE_CAPACITY=capacity, FAKE_FAILURES=json.dumps([stuck]))
    assert done.status == 0, done.stderr
    assert made(done.argvs)[:2] == [
        ("create", "us-central2-b", "tpu-vm", False), ("delete", "us-central2-b", "tpu-vm", False)
    ]  # fmt: skip
    late = gcloud.run("create", ZONES, "--wait", "--wait_seconds=0", NAME="late", FAKE_CAPACITY="")
    assert late.status == 1 and len(made(late.argvs)) == 1


@pytest.mark.parametrize(("wait_seconds", "patience"), [(5.0, 5.0), (1e4, capacity.QUEUED_POLLS * 30.0)])
def test_a_queued_request_is_waited_for_no_longer_than_was_said(monkeypatch, wait_seconds, patience):
    waited = []
    monkeypatch.setattr(capacity, "_attempt", lambda one, seconds: waited.append(seconds) or "no capacity")
    flags = ["--queued", "--name=mine", "--project=p", f"--wait_seconds={wait_seconds}", "--poll_seconds=30"]
    given, _ = settings.read(flags, {})
    assert capacity._tried(given, [given], {}, end=0.0) is None and waited == [patience]


def test_a_pod_that_is_there_is_neither_made_nor_deleted(gcloud):
    done = gcloud.run("create", ZONES, "--wait")  # this fake has a pod in every zone
    assert done.status == 0 and made(done.argvs) == [] and "exists already" in done.stdout


HEARS = (  # the end of a terminal, which the suite ignores under nohup
    "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_interrupted_while_a_pod_is_made_nothing_of_it_stays(gcloud, number):
    """By Ctrl-C, or by the end of a terminal."""
    zone = "us-central2-b"
    environment = gcloud.environment | {"FAKE_CAPACITY": f"{zone}:demand", "FAKE_SLOW": zone}
    words = [sys.executable, "-c", HEARS, "pod.py", "create", ZONES, "--wait"]
    running = subprocess.Popen(words, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)
    wait_until(lambda: gcloud.log.exists() and '"create"' in gcloud.log.read_text(), "the request")
    running.send_signal(number)
    said, _ = running.communicate(timeout=60)
    calls = [json.loads(line)["argv"] for line in gcloud.log.read_text().splitlines()]
    assert running.returncode == 130 and f"{zone}: torus: deleted" in said
    assert made(calls) == [("create", zone, "tpu-vm", False), ("delete", zone, "tpu-vm", False)]


def test_zones_are_for_gcloud_and_need_a_project(gcloud):
    local = gcloud.run("create", ZONES, TRANSPORT="local")
    assert local.status == 2 and "a local pod is made at once" in local.last_line
    assert gcloud.run("create", ZONES, PROJECT="-", ZONE="-").last_line.startswith("error: PROJECT is not set")
