# SPDX-License-Identifier: Apache-2.0
"""Commands on the hosts of a pod by ssh: which workers run them, and what is known of each."""

import json
import subprocess
import threading
import time

import pytest

from pods import calls, hosts, life, settings
from pods.connection import connect
from pods.transports import Result
from tests.pods.recording import Recorder


@pytest.fixture
def gcloud(tmp_path):
    return Recorder(tmp_path)


def read(*words: str, **environment: str) -> settings.Settings:
    return settings.read(list(words), environment)[0]


def test_a_worker_has_one_number_in_all_slices(gcloud):
    """The hosts of each slice count from 0; jax counts its processes slice by slice."""
    text = hosts.in_code(read(REPO_DIR="~/."), f"echo number {hosts.WORKER_NUMBER} > number")
    common = {"FAKE_RUN": "1", "FAKE_HOSTS": "2", "FAKE_SLICES": "3"}
    for words, workers in ([], range(6)), (["--worker=3-4,1"], (1, 3, 4)):
        done = gcloud.run("ssh", "--queued", "--slices=3", *words, "--", text, **common)
        assert done.status == 0, done.stderr
        files = list(gcloud.folder.glob("worker-*/number"))
        found = {file.parent.name: file.read_text() for file in files}
        assert found == {f"worker-{i}": f"number {i}\n" for i in workers}
        for file in files:
            file.unlink()
    missing = gcloud.run("ssh", "--queued", "--slices=3", "--worker=6", "--", text, **common)
    assert missing.status == 2 and "the pod has workers 0 to 5" in missing.last_line


@pytest.mark.parametrize("missing", [0, 1])
def test_without_one_slice_the_hosts_of_the_others_are_reached(gcloud, missing):
    """So `stop` ends what still runs there; the call of the missing one fails."""
    gone = "ERROR: (gcloud.compute.tpus.tpu-vm) NOT_FOUND: Resource 'nodes/torus' was not found"
    failures = [{"verb": f"{verb} torus-{missing} ", "status": 1, "stderr": gone} for verb in ("describe", "ssh")]
    common = {"FAKE_RUN": "1", "FAKE_HOSTS": "2", "FAKE_SLICES": "3", "FAKE_FAILURES": json.dumps(failures)}
    done = gcloud.run("stop", "--queued", "--slices=3", **common)
    assert done.status == 1 and "was not found" in done.stderr
    there = sorted({0, 1, 2, 3, 4, 5} - {2 * missing, 2 * missing + 1})
    assert sorted(done.stdout.splitlines()) == [f"worker {i}: nothing runs" for i in there]


@pytest.mark.parametrize("worker, calls", [("2-3", 2), ("all", 1), ("0", 1)])
def test_the_failure_of_any_worker_is_known(gcloud, worker, calls):
    done = gcloud.run("ssh", f"--worker={worker}", "--", "false", FAKE_SSH_STATUS="3")
    assert (done.status, len([argv for argv in done.argvs if argv[3] == "ssh"])) == (3, calls)


def test_the_output_of_each_worker_is_in_a_file(gcloud):
    for words in (["tail", "--worker=all"], ["ssh", "--worker=1,2", "--", "true"]):
        logs = gcloud.folder / words[0]
        done = gcloud.run(*words[:2], f"--output-directory={logs}", *words[2:], FAKE_SSH_OUTPUT="its log")
        assert done.status == 0, done.stderr
        names = [f"{i}.log" for i in (range(4) if words[0] == "tail" else (1, 2))]
        assert {file.name: file.read_text() for file in logs.iterdir()} == dict.fromkeys(names, "its log\n")


def test_processes_that_wait_for_each_other_run_all_at_once(gcloud):
    """As those of `validate` do; with a limit they would wait for ever."""
    given = read("--zone=us-central2-b", "--project=p")
    pod = connect(given)
    pod.num_workers, meeting = 40, threading.Barrier(40)
    pod.run = lambda command, worker, show, limit_s: [Result(int(worker), meeting.wait(timeout=20) and 0)]
    assert [result.worker for result in pod.run_each("true", together=True)] == list(range(40))


def test_a_call_that_takes_too_long_is_killed_with_its_children():
    result = calls._run(["bash", "-c", "sleep 987 & wait"], False, 0.2)
    assert (result.status, result.output) == (255, "no answer within 0 s")
    assert not subprocess.run(["pgrep", "-f", "sleep 987"], capture_output=True).stdout


@pytest.mark.parametrize("worker", ["all", "0-39"])
def test_logs_of_many_workers_are_read_some_at_a_time(monkeypatch, tmp_path, worker):
    """Each is a process of gcloud. The programs of `ssh` run all at once, because they may wait for each other."""
    given = read("--zone=z", "--project=p", f"--output_directory={tmp_path}", f"--worker={worker}")
    pod, running, seen = connect(given), [], []
    pod.num_workers = 40

    def call(words, **_):
        running.append(words)
        seen.append(len(running))
        time.sleep(0.3)
        running.pop()
        return Result(None, 0, "")

    monkeypatch.setattr(pod, "_call", call)
    life.tail(given, pod, [])
    assert len(seen) == 40 and 1 < max(seen) <= 32
    meeting = threading.Barrier(40)
    monkeypatch.setattr(pod, "_call", lambda *_, **__: Result(None, meeting.wait(timeout=20) and 0))
    life.ssh(given, pod, ["true"])


@pytest.mark.parametrize("words", ["ssh --worker=2 -- true", "ssh -- true", "copy pod.py torus:/x"])
def test_a_host_that_gcloud_did_not_reach_is_not_asked_again(gcloud, words):
    """It has tried ten times, and a connection that was lost may have run the command."""
    refused = "ssh: connect to host 10.0.0.4 port 22: Connection timed out"
    refused += "\nERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255]."
    failure = {"verb": f"tpu-vm {'scp' if 'copy' in words else 'ssh'}", "status": 255, "stderr": refused, "times": 2}
    done = gcloud.run(*words.split(), FAKE_FAILURES=json.dumps([failure]))
    assert (done.status, len(done.calls)) == (255 if "ssh" in words else 1, 1)


def test_an_unreachable_host_is_looked_at_once_by_status(gcloud):
    unreachable = {"verb": "--worker=2", "status": 255, "stderr": "Connection timed out"}
    done = gcloud.run("status", FAKE_FAILURES=json.dumps([unreachable]), FAKE_SSH_OUTPUT="{}")
    assert len([argv for argv in done.argvs if argv[3] == "ssh"]) == 4
    assert "worker 2 is unreachable: Connection timed out" in done.stdout


@pytest.mark.parametrize("alive", [False, True])
def test_stop_ends_setup_optimizations_only_where_it_holds_the_devices(gcloud, alive):
    """After Ctrl-C it keeps the chips. During a run it uses none, and `stop` is for the run."""
    answer = {"alive": alive, "pid": None, "status": None, "stopped": False, "now": 9, "started": None}
    answer |= {"commit": "", "changed": 0, "rss_gib": 0, "heartbeat": None}
    done = gcloud.run("setup_optimizations", "--model_size=tiny", FAKE_SSH_OUTPUT=json.dumps(answer))
    [command] = [word for argv in done.argvs for word in argv if "deploy_optimizations.py" in word]
    assert ("echo attached > run.command" in command) != alive and ("--ahead" in command) == alive
