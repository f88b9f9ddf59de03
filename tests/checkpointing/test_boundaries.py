# SPDX-License-Identifier: Apache-2.0
"""A process that is killed at any change that a save makes to files leaves the old or the new checkpoint, good."""

import os
import pathlib
import shutil

import jax
import numpy as np
import pytest

from checkpointing import manifest
from checkpointing.checkpoints import Checkpoints
from checkpointing.retention import Retention
from tests import warm

ONE = Retention(newest=1)
# Of each number N in a copy of its own: take a save from the arrays that Orbax has written to its end, the deletion of
# the old checkpoint included, and be killed before the Nth change to files; until there is no such change any more.
KILLED = """
import os, pathlib, shutil, signal, sys
from checkpointing.shared_folder import SharedFolder

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate")
prepared, copies, staged = sys.argv[1:]

def save(workdir, number):
    left = number
    def hook(event, arguments):
        nonlocal left
        is_write = event == "open" and arguments[1] is not None and set(str(arguments[1])) & set("wax+")
        if is_write or event in CHANGES:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
    staging = pathlib.Path(workdir, "staging") if staged else None
    folder = SharedFolder(workdir, staging)
    own = folder._own(2)
    own.parent.mkdir(parents=True)
    pathlib.Path(workdir, "written").rename(own)
    sys.addaudithook(hook)
    parts = [folder.describe(2)]
    folder.join(2, parts)
    folder.commit(2, parts)
    folder.clear()
    folder.remove(1)

number = 0
while True:
    number += 1
    workdir = pathlib.Path(copies, str(number))
    shutil.copytree(prepared, workdir)
    child = os.fork()
    if not child:
        save(workdir, number)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
print(number)
"""


TWICE = """
import sys
import jax
import numpy as np
from checkpointing.checkpoints import Checkpoints
from checkpointing.retention import Retention

workdir, who = sys.argv[1], int(sys.argv[2])
with Checkpoints(workdir, Retention(newest=99)) as checkpoints:
    checkpoints.report = lambda text, **figures: None
    for step in range(1, 9):
        state = {"weight": jax.numpy.full(1 << 16, who, np.float32), "bias": jax.numpy.full(64, who, np.float32)}
        checkpoints.save(step, state, {"step": step})
        checkpoints.wait()
    checkpoints.failure = None
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> pathlib.Path:
    """A workdir with a checkpoint of step 1, and what Orbax has written of one of step 2."""
    workdir = tmp_path_factory.mktemp("prepared")
    with Checkpoints(workdir, Retention(newest=2)) as checkpoints:
        for step in (1, 2):
            state = {"weight": jax.numpy.full(64, step, np.float32), "step": jax.numpy.int32(step)}
            checkpoints.save_and_wait(step, state, {"step": step})
    (workdir / "checkpoints" / "2").rename(workdir / "written")
    (workdir / "written" / manifest.NAME).unlink()
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("staged", ["", "staged"])
def test_wherever_a_save_is_killed_there_is_a_good_checkpoint_and_the_next_start_clears_up(prepared, tmp_path, staged):
    process = warm.start(["-c", KILLED, str(prepared), str(tmp_path), staged], dict(os.environ))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    count, found = int(out), []
    assert count > 15  # changes, and the end after them
    for number in range(1, count + 1):
        with Checkpoints(tmp_path / str(number), ONE) as checkpoints:
            step = checkpoints.newest()
            found.append(step)
            checkpoints.store.clear()
            assert checkpoints.store.others() == {}, number
            assert checkpoints.record(step)["step"] == step
            assert not checkpoints.problems(step), number
    assert found == sorted(found) and set(found) == {1, 2}  # once there is the new one, it stays
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_of_two_processes_that_save_the_same_steps_no_checkpoint_has_parts_of_both(tmp_path):
    """As after the lock of a run was deleted: saves may fail, and what is there is one's or the other's."""
    both = [warm.start(["-c", TWICE, str(tmp_path), who], dict(os.environ)) for who in "12"]
    for process in both:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    abstract = {name: jax.ShapeDtypeStruct((size,), np.float32) for name, size in (("weight", 1 << 16), ("bias", 64))}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.report = lambda text, **figures: None
        assert checkpoints.steps(), "both may fail to save some steps, but not all"
        for step in checkpoints.steps():
            assert not checkpoints.problems(step)
            state = checkpoints.restore(step, abstract)
            assert {*np.unique(state["weight"]), *np.unique(state["bias"])} in ({1.0}, {2.0}), step
