# SPDX-License-Identifier: Apache-2.0
"""Saves while the disk is full, read-only or gone, or the process is killed: reported, tried again, nothing lost."""

import contextlib
import errno
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import threading
import time

import jax
import numpy as np
import pytest

from checkpointing import checkpoints as checkpoints_module
from checkpointing import folder_store, shared_folder
from checkpointing.checkpoints import CheckpointError, Checkpoints, Damaged, SaveFailed
from checkpointing.retention import Retention
from tests import groups, warm

# Writes that are under way when one fails end after Orbax has closed their event loop, and each prints that.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
TWO = Retention(newest=2)
WORDS = 1 << 18  # of 4 bytes, in one array
FILE_BYTES = 1 << 16  # how long a file gets on a full disk


def state_of(step: int) -> dict:
    weight = np.random.default_rng(step).random(WORDS, np.float32)  # which cannot be compressed by much
    return {"weight": jax.numpy.asarray(weight), "step": jax.numpy.int32(step)}


def save(checkpoints: Checkpoints, step: int) -> str | None:
    """Save a state; return what became of it where it failed."""
    checkpoints.save(step, state_of(step), {"step": step})
    checkpoints.wait()
    return str(checkpoints.failure) if checkpoints.failure else None


def assert_good(checkpoints: Checkpoints, step: int) -> None:
    """The newest checkpoint is of this step and has what was saved, and there is no half-written one."""
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state_of(step))
    assert checkpoints.newest() == step and checkpoints.record(step)["step"] == step
    jax.tree.map(np.testing.assert_array_equal, checkpoints.restore(step, abstract), state_of(step))
    assert checkpoints.store.others() == {}


@pytest.fixture
def opened(tmp_path):
    """Checkpoints with one of step 1, and the lines that they tell."""
    with Checkpoints(tmp_path / "workdir", TWO) as checkpoints:
        lines, checkpoints.report = [], lambda text, **figures: lines.append(text)
        assert save(checkpoints, 1) is None
        lines.clear()
        yield checkpoints, lines


@contextlib.contextmanager
def full_disk():
    """No file of this process gets longer than FILE_BYTES; Python ignores the signal that comes with that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def mounted(folder: pathlib.Path, size: str):
    """Mount a small disk, where this process may."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("only root may mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def remount(folder: pathlib.Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


def test_on_a_full_disk_the_run_goes_on_and_the_next_save_works(opened):
    checkpoints, lines = opened
    with full_disk():
        save(checkpoints, 2)
        assert_good(checkpoints, 1)
    (line,) = lines
    assert re.fullmatch(
        r"step 2 could not be saved: /\S*: File too large; training goes on, and it is tried again", line
    )
    assert save(checkpoints, 3) is None
    assert_good(checkpoints, 3)


def test_a_disk_that_fills_up_or_becomes_read_only_loses_nothing(tmp_path):
    with mounted(tmp_path / "disk", "2500k"), Checkpoints(tmp_path / "disk" / "workdir", TWO) as checkpoints:
        lines, checkpoints.report = [], lambda text, **figures: lines.append(text)
        assert save(checkpoints, 1) is None and save(checkpoints, 2) is None
        assert "No space left" in save(checkpoints, 3)
        assert checkpoints.steps() == [1, 2]
        assert_good(checkpoints, 2)
        remount(tmp_path / "disk", "size=8m")
        assert save(checkpoints, 4) is None
        remount(tmp_path / "disk", "ro")
        assert "Read-only file system" in save(checkpoints, 5)
        remount(tmp_path / "disk", "rw")
        assert save(checkpoints, 6) is None
        assert_good(checkpoints, 6)
    assert [line for line in lines if line.startswith("step")] == [line for line in lines if line]


@pytest.mark.parametrize("gone", ["checkpoints", "."])
def test_a_folder_that_vanishes_between_two_saves_is_made_again(opened, tmp_path, gone):
    checkpoints, _ = opened
    shutil.rmtree(tmp_path / "workdir" / gone)
    assert save(checkpoints, 2) is None
    assert_good(checkpoints, 2)


@pytest.mark.parametrize("seconds", [0, 0.01, 0.03, 0.06])
def test_a_folder_that_vanishes_during_a_save_fails_it_at_most(opened, tmp_path, seconds):
    checkpoints, _ = opened
    checkpoints.save(2, state_of(2), {"step": 2})
    time.sleep(seconds)
    shutil.rmtree(tmp_path / "workdir", ignore_errors=True)
    checkpoints.wait()
    with contextlib.suppress(Damaged):  # what was complete and then lost some of its files
        assert checkpoints.newest() in (None, 1, 2)
    assert save(checkpoints, 3) is None
    assert checkpoints.newest() == 3


def test_a_file_in_place_of_the_folder_fails_saves_and_is_an_error_to_start_with(opened, tmp_path):
    checkpoints, _ = opened
    folder = tmp_path / "workdir" / "checkpoints"
    folder.rename(tmp_path / "moved")
    folder.touch()
    assert save(checkpoints, 2)
    with pytest.raises(CheckpointError, match="checkpoints is not a folder"):
        Checkpoints(tmp_path / "workdir", TWO)
    folder.unlink()
    (tmp_path / "moved").rename(folder)
    assert save(checkpoints, 3) is None
    assert_good(checkpoints, 3)


def test_what_was_saved_before_a_late_failure_does_not_hinder_the_same_step(opened, monkeypatch):
    checkpoints, _ = opened
    folder, sync = checkpoints.store.place, folder_store.sync

    def fails_at_the_end(path):
        if path == folder:
            raise OSError("gone for a moment")
        sync(path)

    monkeypatch.setattr(folder_store, "sync", fails_at_the_end)
    assert save(checkpoints, 2) == "gone for a moment"
    monkeypatch.undo()
    assert save(checkpoints, 2) is None
    assert checkpoints.newest() == 2 and checkpoints.steps() == [1, 2]


def test_a_failure_without_a_file_names_the_folder(opened, monkeypatch):
    checkpoints, _ = opened

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder_store, "sync", full)
    assert save(checkpoints, 2) == f"{checkpoints.store.place}: No space left on device"
    monkeypatch.undo()
    assert save(checkpoints, 2) is None


def test_a_save_that_failed_is_tried_again_after_longer_and_longer_parts_of_the_interval(opened):
    checkpoints, _ = opened
    assert not any(checkpoints.due_again(step, 64) for step in range(1, 65))
    due = []
    with full_disk():
        save(checkpoints, 64)
        for step in range(65, 128):
            if checkpoints.due_again(step, 64):
                due.append(step)
                save(checkpoints, step)
    assert due == [68, 76, 92, 124]
    assert save(checkpoints, 128) is None
    assert not any(checkpoints.due_again(step, 64) for step in range(129, 193))


def test_a_save_that_was_left_out_is_made_up_for_once_the_one_before_has_ended(opened, monkeypatch):
    checkpoints, lines = opened
    monkeypatch.setattr(checkpoints_module, "PATIENCE_SECONDS", 0)
    goes_on, write = threading.Event(), checkpoints.store.write

    def slow(step, record):
        assert goes_on.wait(60)
        write(step, record)

    monkeypatch.setattr(checkpoints.store, "write", slow)
    checkpoints.save(64, state_of(64), {"step": 64})
    checkpoints.save(128, state_of(128), {"step": 128})
    assert lines == ["step 128 not saved: the previous save is still running"]
    assert not checkpoints.due_again(132, 64)  # it still runs
    goes_on.set()
    checkpoints.wait()
    assert checkpoints.due_again(136, 64)
    assert save(checkpoints, 136) is None
    assert not any(checkpoints.due_again(step, 64) for step in range(137, 192))


def test_the_last_save_is_tried_some_times_and_then_an_error(opened, monkeypatch):
    checkpoints, lines = opened
    monkeypatch.setattr(checkpoints_module, "LAST_TRIES_SECONDS", (0, 0, 0))
    with full_disk(), pytest.raises(SaveFailed, match="File too large; the steps after checkpoint 1 are lost"):
        checkpoints.save_and_wait(2, state_of(2), {"step": 2})
    assert len(lines) == 3 and not any("training goes on" in line for line in lines)
    checkpoints.save_and_wait(2, state_of(2), {"step": 2})
    assert_good(checkpoints, 2)


def test_a_failed_save_is_the_end_of_a_run_that_ends_with_it(tmp_path):
    with pytest.raises(SaveFailed, match="File too large"), Checkpoints(tmp_path, TWO) as checkpoints, full_disk():
        save(checkpoints, 1)


def staged(tmp_path) -> Checkpoints:
    """Return checkpoints that are saved to a local disk first."""
    return Checkpoints(tmp_path / "workdir", TWO, staging=tmp_path / "staging")


def test_with_staging_a_checkpoint_is_copied_and_the_local_one_goes(tmp_path):
    with staged(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            assert save(checkpoints, step) is None
        assert_good(checkpoints, 3)
        assert checkpoints.steps() == [2, 3]
    assert [path for path in (tmp_path / "staging").rglob("*") if path.is_file()] == []


def test_a_copy_that_comes_out_wrong_is_a_failed_save(tmp_path, monkeypatch):
    with staged(tmp_path) as checkpoints:
        assert save(checkpoints, 1) is None
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "copyfileobj", lambda source, copy, size: copy.write(source.read()[:-1]))
            assert "differs from its source" in save(checkpoints, 2)
        assert_good(checkpoints, 1)
        assert save(checkpoints, 3) is None
        assert_good(checkpoints, 3)


def test_a_staging_folder_that_is_full_or_cannot_be_made_fails_the_save_until_it_can(tmp_path):
    with staged(tmp_path) as checkpoints:
        with full_disk():
            assert "File too large" in save(checkpoints, 1)
        shutil.rmtree(tmp_path / "staging")
        (tmp_path / "staging").touch()
        assert "Not a directory" in save(checkpoints, 2)
        assert checkpoints.newest() is None
        (tmp_path / "staging").unlink()
        assert save(checkpoints, 3) is None
        assert_good(checkpoints, 3)


def test_two_runs_of_one_name_have_staging_folders_of_their_own(tmp_path, monkeypatch):
    folders = set()
    for parent in ("one", "other"):
        (tmp_path / parent).mkdir()
        monkeypatch.chdir(tmp_path / parent)
        folders.add(Checkpoints("mine", staging=tmp_path / "staging").store.staging)
    assert len(folders) == 2


SAVES = """
import sys, pathlib
import jax
import numpy as np
from checkpointing.checkpoints import Checkpoints
from checkpointing.retention import Retention

with Checkpoints(sys.argv[1], Retention(newest=2), staging=sys.argv[2] or None) as checkpoints:
    step = checkpoints.newest() or 0
    while True:
        step += 1
        weight = np.random.default_rng(step).random(1 << 18, np.float32)
        state = {"weight": jax.numpy.asarray(weight), "step": jax.numpy.int32(step)}
        checkpoints.save_and_wait(step, state, {"step": step})
        print(step, flush=True)
"""


@pytest.mark.parametrize("staging", ["", "staging"])
def test_a_process_that_is_killed_while_it_saves_leaves_good_checkpoints(tmp_path, staging):
    rng = random.Random(staging)
    folders = [str(tmp_path / "workdir"), staging and str(tmp_path / staging)]
    process = warm.start(["-c", SAVES, *folders], dict(os.environ))
    try:
        steps = [int(process.stdout.readline()) for _ in range(rng.randrange(2, 6))]
        time.sleep(rng.random() * 0.2)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    with Checkpoints(tmp_path / "workdir", TWO, staging=staging and tmp_path / staging) as checkpoints:
        newest = checkpoints.newest()
        assert newest >= steps[-1]
        assert_good(checkpoints, newest)
        assert save(checkpoints, newest + 1) is None
        assert_good(checkpoints, newest + 1)


IN_A_GROUP = """
import json, os, pathlib, resource, sys
from cluster import processes, startup
from cluster.group import find_group

startup.choose_platform(None, "cpu", pathlib.Path(os.environ["XDG_CACHE_HOME"]))
processes.start(find_group(os.environ, "cpu", 60), 60, lambda line, status: sys.exit(line))

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from checkpointing.checkpoints import Checkpoints
from checkpointing.retention import Retention

sharding = NamedSharding(Mesh(jax.devices(), ("fsdp",)), PartitionSpec("fsdp"))
abstract = {"weight": jax.ShapeDtypeStruct((1 << 18,), np.float32, sharding=sharding)}
values = np.arange(1 << 18, dtype=np.float32)
state = {"weight": jax.make_array_from_callback(values.shape, sharding, lambda part: values[part])}
staging = pathlib.Path(os.environ["HOME"]) / "staging" if sys.argv[2] else None
failures = []
with Checkpoints(sys.argv[1], Retention(newest=2), staging=staging) as checkpoints:
    checkpoints.report = lambda text, **figures: text and print(text, file=sys.stderr)
    for step in (1, 2, 3):
        if step == 2 and processes.index() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, resource.RLIM_INFINITY))
        checkpoints.save(step, state, {"step": step})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        failures.append(str(checkpoints.failure or ""))
    newest = checkpoints.newest()
    restored = checkpoints.restore(newest, abstract)["weight"]
    same = all(np.array_equal(shard.data, values[shard.index]) for shard in restored.addressable_shards)
    print(json.dumps({"failures": failures, "newest": newest, "steps": checkpoints.steps(), "same": same}))
processes.leave()
"""


@pytest.mark.parametrize("staging", ["", "staging"])
def test_where_the_disk_of_one_process_is_full_all_tell_which_and_the_next_save_works(tmp_path, staging):
    homes = {index: {"HOME": str(tmp_path / f"home{index}")} for index in (0, 1)}
    arguments = ["-c", IN_A_GROUP, str(tmp_path / "workdir"), staging]
    try:
        ended = groups.finish(groups.start(arguments, count=2, cache=tmp_path / "cache", variables=homes))
    finally:
        groups.end_all()
    assert [status for status, _, _ in ended] == [0, 0], ended
    for _, out, _ in ended:
        # A library may write to the end of the same line.
        (told,) = (json.JSONDecoder().raw_decode(line)[0] for line in out.splitlines() if line.startswith("{"))
        assert told | {"failures": None} == {"failures": None, "newest": 3, "steps": [1, 3], "same": True}
        first, second, third = told["failures"]
        assert first == third == "" and second.startswith("process 1 (") and "File too large" in second
    assert {path.name for path in (tmp_path / "workdir" / "checkpoints").iterdir()} == {"1", "3"}


def test_remains_that_cannot_be_deleted_are_reported_by_the_run(tmp_path, monkeypatch, capsys):
    """The report comes before the run has a log, which writes it later as an event. Other checkpoints go as ever."""

    def fails(store):
        raise PermissionError("not yours")

    monkeypatch.setattr(shared_folder.SharedFolder, "clear", fails)
    with Checkpoints(tmp_path, Retention(2)) as checkpoints:
        assert checkpoints.early_events == [{"event": "not_cleared"}]
        for step in 1, 2, 3:
            checkpoints.save(step, {"weight": jax.numpy.full(4, step)}, {"step": step})
            checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
    assert "cannot be deleted: not yours" in capsys.readouterr().err
