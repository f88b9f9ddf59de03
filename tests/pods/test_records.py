# SPDX-License-Identifier: Apache-2.0
"""What is kept of a launch, answers that are not answers, and that a dry run prints what would be called."""

import json
import os
import re
import subprocess
import types

import pytest

from pods import records
from tests.pods.recording import Recorder


@pytest.fixture
def gcloud(tmp_path):
    return Recorder(tmp_path)


def test_an_answer_that_is_no_json_is_one_line(gcloud):
    failure = {"verb": "tpu-vm describe", "status": 0, "stderr": ""}
    for words in (["describe"], ["status"]):
        done = gcloud.run(*words, FAKE_FAILURES=json.dumps([failure]))
        assert (done.status, len(done.stderr.strip().splitlines())) == (1, 1), done.stderr
        assert "tpu-vm describe: the output is not a JSON description" in done.last_line


def test_what_is_launched_is_known_before_and_forgotten_with_the_pod(gcloud):
    record = gcloud.folder / "pods" / "torus" / "launch.json"
    variables = {"FAKE_RUN": "1", "FAKE_HOSTS": "2"}
    for i in range(2):
        (gcloud.folder / f"worker-{i}" / "torus").mkdir(parents=True)
    failure = {"verb": "setsid", "status": 1, "stderr": "ERROR: (gcloud.x) worker 1 is away"}
    assert gcloud.run("launch", "--", "true", FAKE_FAILURES=json.dumps([failure]), **variables).status == 1
    assert json.loads(record.read_text())["words"] == ["true"]
    assert gcloud.run("restart", **variables).status == 0
    denied = {"verb": "tpu-vm delete", "status": 1, "stderr": "ERROR: (gcloud.x) PERMISSION_DENIED"}
    assert gcloud.run("delete", FAKE_FAILURES=json.dumps([denied])).status == 1 and record.exists()
    assert gcloud.run("delete", "--dry_run").status == 0 and record.exists()
    assert gcloud.run("delete").status == 0 and not record.exists()


def test_what_is_known_of_a_pod_stays_if_another_zone_is_typed(gcloud):
    """Else `supervise` no longer watches a pod that runs on."""
    assert gcloud.run("create").status == 0
    record = gcloud.folder / "pods" / "torus" / "created.json"
    done = gcloud.run("delete", "--zone=us-east5-a", FAKE_HOSTS="0")
    assert done.status == 0 and record.exists()
    assert done.stdout.endswith("is in us-central2-b of my-project; its records stay\n")
    done = gcloud.run("delete", "--project=other", FAKE_HOSTS="0")
    assert done.status == 0 and record.exists()
    done = gcloud.run("delete", FAKE_HOSTS="0")
    assert done.status == 0 and not record.exists() and "its records" not in done.stdout


def test_the_records_of_a_request_go_with_it_though_the_environment_names_another_zone(gcloud):
    assert gcloud.run("create", "--queued", "--queued_resource=q", ACCEL="v4-16").status == 0
    done = gcloud.run("delete", FAKE_HOSTS="0", ZONE="us-east5-a")
    assert done.argvs[-1][2:6] == ["queued-resources", "delete", "q", "--zone=us-central2-b"]
    assert not (gcloud.folder / "pods" / "torus" / "created.json").exists() and "its records" not in done.stdout


def test_the_records_of_a_request_that_could_not_be_deleted_stay(gcloud):
    """Else the next `delete` finds nothing, and the request becomes a pod that is billed."""
    assert gcloud.run("create", "--queued", "--queued_resource=q", ACCEL="v4-16").status == 0
    denied = {"verb": "queued-resources delete", "status": 1, "stderr": "ERROR: (gcloud.x) PERMISSION_DENIED"}
    for zone in ("us-central2-b", "us-east5-a"):
        done = gcloud.run("delete", FAKE_HOSTS="0", FAKE_FAILURES=json.dumps([denied]), ZONE=zone)
        assert done.status == 1 and (gcloud.folder / "pods" / "torus" / "created.json").exists()


def test_what_is_known_of_a_pod_that_could_not_be_deleted_stays(tmp_path):
    """For example its folder cannot be written."""
    asked = types.SimpleNamespace(pod_folder=tmp_path, dry_run=False)
    for name in ("launch.json", "created.json"):
        (tmp_path / name).write_text(name)
    for error, kept in ((PermissionError, {"launch.json", "created.json"}), (KeyboardInterrupt, {"created.json"})):
        with pytest.raises(error), records.forgotten(asked):
            raise error
        assert {path.name for path in tmp_path.iterdir()} == kept
        assert (tmp_path / "created.json").read_text() == "created.json"


def test_what_could_not_be_stopped_is_not_said_to_have_been_started_again(gcloud):
    variables = {"FAKE_RUN": "1", "FAKE_HOSTS": "1"}
    (gcloud.folder / "worker-0" / "torus").mkdir(parents=True)
    assert gcloud.run("launch", "--", "sleep", "600", **variables).status == 0
    away = {"verb": "kill -s TERM", "status": 1, "stderr": "ERROR: (gcloud.x) worker 0 is away"}
    done = gcloud.run("restart", FAKE_FAILURES=json.dumps([away]), **variables)
    assert done.status == 1 and "the previous program still runs" in done.last_line
    assert gcloud.run("stop", **variables).status == 0


def test_a_dry_run_of_launch_shows_the_secrets_way_and_of_setup_its_warning_as_a_comment(gcloud, monkeypatch):
    launched = gcloud.run("launch", "--dry-run", "--", "true", HF_TOKEN="hf_secret")
    assert "scp /tmp/private/.env 'torus:~/torus/.env'" in launched.stdout and "chmod 600 .env" in launched.stdout
    assert "hf_secret" not in launched.stdout + launched.stderr
    monkeypatch.setattr(records, "code_state", lambda: ("c" * 40, ["pod.py"]))
    setup = gcloud.run("setup", "--dry-run", "--repo_url=https://example.com/torus", MODEL_SIZE="tiny")
    assert setup.status == 0, setup.stderr
    assert "# warning: the hosts get the commit without the uncommitted changes" in setup.stdout.splitlines()[0]
    monkeypatch.setattr(records, "code_state", lambda: ("", []))  # git refuses: the hosts would stay where they are
    setup = gcloud.run("setup", "--dry-run", "--repo_url=https://example.com/torus", MODEL_SIZE="tiny")
    assert setup.status == 2 and "is not a git clone with a commit" in setup.last_line


def test_a_dry_run_of_validate_prints_a_call_for_each_worker(gcloud):
    done = gcloud.run("validate", "--dry-run", BUCKET="b", MODEL_SIZE="tiny", ACCEL="v4-16")
    calls = [line for line in done.stdout.splitlines() if "check_host.py" in line]
    assert [re.search(r"--worker=(\S+)", line)[1] for line in calls] == ["0", "1"], done.stderr


def test_a_file_whose_name_is_not_utf_8_is_copied_to_the_hosts(tmp_path):
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).touch()
    found = records.git("-C", str(tmp_path), "ls-files", "--others", "-z").stdout
    assert os.fsencode(found) == b"caf\xe9.txt\0"


def test_git_is_asked_about_this_checkout_also_in_a_hook_of_another(tmp_path, monkeypatch):
    """git exports these to its hooks, and they win over the folder and over -C."""
    here = records.git("rev-parse", "HEAD").stdout
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "other")], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "other" / "index"))
    assert here and records.git("rev-parse", "HEAD").stdout == here
    toplevel = records.git("-C", str(tmp_path / "other"), "rev-parse", "--show-toplevel").stdout.strip()
    assert toplevel == str(tmp_path / "other")
