# SPDX-License-Identifier: Apache-2.0
"""A workdir has one run at a time; the error of a second run names the first."""

import fcntl
import json
import pathlib
import subprocess
import sys
import threading

import pytest

from checkpointing.checkpoints import CheckpointError
from checkpointing.workdir import exclusive, local_folder
from files.lock import is_held
from tests.support import ROOT

HOLDER = """
import pathlib, sys
from checkpointing.workdir import exclusive
with exclusive(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    input()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that trains in tmp_path."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def hold(workdir: pathlib.Path) -> dict:
    """Return the name that we leave in a workdir while we hold it."""
    with exclusive(workdir):
        return json.loads((workdir / "lock").read_text())


def test_a_caller_names_a_local_folder():
    assert local_folder("~/runs/x") == pathlib.Path.home() / "runs" / "x"
    assert local_folder("exp:/x") == pathlib.Path("exp:/x")
    for url in ("gs://bucket/x", pathlib.Path("gs://bucket/x")):
        with pytest.raises(CheckpointError, match="is not a local folder; for a run in a bucket give `bucket`"):
            local_folder(url)


def test_the_second_run_is_told_host_process_and_time_of_the_first(holder, tmp_path):
    first = json.loads((tmp_path / "lock").read_text())
    assert first["pid"] == holder.pid
    with pytest.raises(CheckpointError) as caught:
        hold(tmp_path)
    assert str(caught.value).startswith(
        f"process {holder.pid} on {first['host']} has been training in {tmp_path} since {first['since']}. Use another"
    )
    assert json.loads((tmp_path / "lock").read_text()) == first


def test_the_lock_of_a_process_that_was_killed_is_taken_over_in_the_same_file(holder, tmp_path):
    file = (tmp_path / "lock").stat().st_ino
    holder.kill()
    holder.wait()
    assert hold(tmp_path)["pid"] != holder.pid
    assert (tmp_path / "lock").stat().st_ino == file


def test_a_lock_without_a_name_holds_too(holder, tmp_path):
    (tmp_path / "lock").write_text("")
    with pytest.raises(CheckpointError, match="another process has been training in"):
        hold(tmp_path)


def test_one_who_asks_whether_a_run_is_alive_makes_no_start_fail(tmp_path):
    """`files/lock.py: is_held` holds the lock for a moment."""
    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open("rb") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, [asking, fcntl.LOCK_UN]).start()
        with exclusive(tmp_path):
            assert is_held(tmp_path / "lock")
