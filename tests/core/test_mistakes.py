# SPDX-License-Identifier: Apache-2.0
"""A mistake of a user in batches, rewards or callbacks names its place, and the steps before it are saved."""

import pytest

from checkpointing.checkpoints import SaveFailed
from core.between_steps.user_errors import save_on_user_error
from core.callbacks import Callback, wrapped
from input_pipeline.errors import DataError
from reporting.step_log import Diverged


class Job:
    """Notes the steps that are saved, and what is logged."""

    def __init__(self, error: Exception | None = None):
        self.saved, self.events, self.error, self.log = [], [], error, self

    def save(self, state, step, *, ends):
        if self.error:
            raise self.error
        self.saved.append((step, ends))

    def event(self, line, kind, step, **more):
        self.events.append((line, kind, more))


@pytest.mark.parametrize(
    ("error", "saved"),
    [
        (KeyError("a reader"), [(3, True)]),
        (ZeroDivisionError(), [(3, True)]),
        (KeyboardInterrupt(), []),  # of a second signal, which promises not to save
        (SystemExit(2), []),
        (DataError("gone"), []),  # the loop saves
        (Diverged("the loss", 3, 3), []),  # the loop rolls back
    ],
)
def test_what_nobody_handles_is_raised_after_a_save(error, saved):
    job = Job()
    with pytest.raises(type(error)), save_on_user_error(job, None, 3):
        raise error
    assert job.saved == saved


def test_a_good_block_and_the_first_step_save_nothing():
    job = Job()
    with save_on_user_error(job, None, 3):
        pass
    with pytest.raises(KeyError), save_on_user_error(job, None, 0):
        raise KeyError
    assert job.saved == []


def test_a_save_that_fails_does_not_hide_the_mistake():
    job = Job(SaveFailed("the disk is full"))
    with pytest.raises(KeyError), save_on_user_error(job, None, 3):
        raise KeyError
    assert job.events == [("step 3 not saved: the disk is full", "save_failed", {"error": "the disk is full"})]


def test_a_callback_that_wraps_a_step_into_nothing_is_named():
    class Forgets(Callback):
        def wrap(self, train_step, job):
            """It lacks its return."""

    with pytest.raises(TypeError, match=r"^Forgets\.wrap returned None; it must return a step"):
        wrapped(print, [Forgets()], None)
