# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are kept, and when the others go."""

import shutil

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing.checkpoints import Checkpoints
from checkpointing.retention import Retention

STEPS = st.lists(st.integers(0, 60), unique=True, max_size=12)
RULES = st.builds(Retention, newest=st.integers(1, 4), every=st.integers(0, 7), best=st.integers(0, 3))


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, {"weight": jax.numpy.full(4, step)}, {"step": step})
    checkpoints.wait()


def names(tmp_path) -> set[str]:
    return {path.name for path in (tmp_path / "checkpoints").iterdir()}


@given(rule=RULES, steps=STEPS, losses=st.dictionaries(st.integers(0, 60), st.floats(0, 9), max_size=12))
def test_what_is_kept_is_the_newest_every_so_many_steps_and_the_best(rule, steps, losses):
    kept = rule.reasons(steps, losses)
    ranked = sorted((losses[step], step) for step in steps if step in losses)
    best = {step for _, step in ranked[: rule.best]}
    every = {step for step in steps if rule.every and step % rule.every == 0}
    newest = set(sorted(steps, reverse=True)[: rule.newest])
    assert kept.keys() == best | every | newest
    for step, reason in kept.items():
        assert step in {"n": newest, "e": every, "b": best}[reason[0]]


def test_of_equal_losses_the_earlier_is_the_best():
    assert Retention(newest=1, best=1).reasons([1, 2, 3], {1: 0.5, 2: 0.5}).keys() == {1, 3}


@given(rule=RULES, steps=STEPS)
@settings(max_examples=30)
def test_one_save_after_the_other_keeps_what_all_at_once_would(rule, steps):
    kept, losses = [], {step: float(-step % 11) for step in steps if step % 3}
    for step in sorted(steps):
        kept = sorted(rule.reasons([*kept, step], {s: losses[s] for s in losses if s <= step}))
    assert set(rule.reasons(steps, losses)) <= set(kept)
    assert kept == sorted(rule.reasons(kept, losses))


def test_the_best_by_held_out_loss_and_every_so_many_steps_stay(tmp_path):
    with Checkpoints(tmp_path, Retention(newest=1, every=4, best=1)) as checkpoints:
        for step in range(1, 8):
            checkpoints.losses[step] = abs(step - 2.2)
            save(checkpoints, step)
    assert names(tmp_path) == {"2", "4", "7"}


def test_nothing_is_deleted_before_the_newer_one_is_committed(tmp_path, monkeypatch):
    with Checkpoints(tmp_path, Retention(newest=1)) as checkpoints:
        save(checkpoints, 1)
        monkeypatch.setattr("checkpointing.manifest.write", lambda *unused: (_ for _ in ()).throw(OSError("no space")))
        save(checkpoints, 2)
        assert names(tmp_path) == {"1"} and checkpoints.newest() == 1
        monkeypatch.undo()
        save(checkpoints, 3)
    assert names(tmp_path) == {"3"}


def test_a_deletion_that_is_cut_short_leaves_no_checkpoint_and_is_taken_up(tmp_path, monkeypatch):
    def cut_short(mark):
        shutil.rmtree(mark / "state")
        raise OSError("cut short")

    with Checkpoints(tmp_path, Retention(newest=1)) as checkpoints:
        save(checkpoints, 1)
        lines, checkpoints.report = [], lambda text, **figures: lines.append(text)
        monkeypatch.setattr(checkpoints.store, "_erase", cut_short)
        save(checkpoints, 2)
        assert names(tmp_path) == {"1.unfinished", "2"} and checkpoints.steps() == [2]
        assert lines[-1] == "step 2 is saved, but clearing up failed: cut short"
        assert checkpoints.failure is None
        monkeypatch.undo()
        save(checkpoints, 3)
    assert names(tmp_path) == {"3"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_a_sink_ends_the_run_and_is_no_failure_of_clearing_up(tmp_path):
    """It was reported as one, and then no checkpoint was deleted any more; a Python program did not see it at all."""

    def broken_sink(text, **figures):
        raise ValueError("the sink broke")

    checkpoints = Checkpoints(tmp_path, Retention(newest=1))
    save(checkpoints, 1)
    checkpoints.report = broken_sink
    with pytest.raises(ValueError, match=r"^the sink broke$"):
        save(checkpoints, 2)
    assert names(tmp_path) == {"1", "2"}


@pytest.mark.parametrize("step", [1, 2])
def test_what_is_kept_is_what_was_saved(tmp_path, step):
    with Checkpoints(tmp_path, Retention(newest=2)) as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
        restored = checkpoints.restore(step, {"weight": jax.ShapeDtypeStruct((4,), np.int32)})
    np.testing.assert_array_equal(restored["weight"], np.full(4, step))


def test_of_a_checkpoint_that_was_moved_to_another_disk_the_link_is_deleted(tmp_path):
    """Otherwise nothing could be deleted any more, and each later checkpoint would stay."""
    with Checkpoints(tmp_path / "run", Retention(newest=1)) as checkpoints:
        save(checkpoints, 1)
        (tmp_path / "run" / "checkpoints" / "1").rename(tmp_path / "1")
        (tmp_path / "run" / "checkpoints" / "1").symlink_to(tmp_path / "1")
        save(checkpoints, 2)
        save(checkpoints, 3)
    assert names(tmp_path / "run") == {"3"}
    assert len(list((tmp_path / "1").iterdir())) > 1
