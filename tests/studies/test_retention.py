# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints of a study stay on disk: with real workers, after a deletion that was cut short, in a bucket."""

import errno
import pathlib
import subprocess

import pytest
from gcsfs.retry import HttpError

from checkpointing import bucket
from checkpointing.folder import CheckpointFolder
from cluster.hub import RunError
from configs.errors import ConfigError
from settings import stored_config
from studies.cost.limits import Limits
from tests.bucket_server import empty_bucket
from tests.studies.conftest import needs_optuna
from tests.studies.test_budget import run
from tests.studies.test_queue import STAND_IN, orders, queue_of, starts, trials_of, write_plan

pytestmark = needs_optuna


def left(folder: pathlib.Path) -> list[list[str]]:
    """Return the names in the folders of checkpoints of all trials; the first has the lower value."""
    places = [pathlib.Path(trial.user_attrs["workdir"]) / "checkpoints" for trial in trials_of(folder)]
    return [sorted(path.name for path in place.iterdir()) for place in places]


def finished(folder: pathlib.Path) -> tuple:
    """Return (queue, its digests) of a study whose two trials are done, with three checkpoints each."""
    queue = queue_of(folder)
    queue.enqueue(orders(folder / "runs"))
    for number, digest in enumerate(queue.latest()):
        trial = queue.claim_next({digest})
        workdir = pathlib.Path(trial.user_attrs["workdir"])
        for step in (10, 15, 20):
            (workdir / "checkpoints" / str(step) / "state").mkdir(parents=True)
        for name in ("metrics.jsonl", "output.txt"):
            (workdir / name).write_text("")
        queue.finish(trial, float(number), {"checkpoint": f"{workdir}/checkpoints/20"}, {})
    return queue, list(queue.latest())


@pytest.mark.parametrize("keep, names, checkpoints", [
    ("last", [["20"], ["20"]], [True, True]),
    ("best", [[], ["20"]], [False, True]),
    ("none", [[], []], [False, False]),
])  # fmt: skip
def test_what_is_not_kept_is_deleted_and_figures_and_logs_stay(tmp_path, keep, names, checkpoints):
    from studies.cost import retention

    queue, digests = finished(tmp_path)
    limits = Limits(keep=keep, groups={"exp08-ema": digests})
    for _ in range(2):
        assert retention.enforce(queue, digests, limits, f"{tmp_path}/runs") == []
        assert left(tmp_path) == names
    assert [bool(trial.user_attrs["checkpoint"]) for trial in trials_of(tmp_path)] == checkpoints
    for trial in trials_of(tmp_path):
        workdir = pathlib.Path(trial.user_attrs["workdir"])
        assert (workdir / "metrics.jsonl").exists() and (workdir / "output.txt").exists()


def test_checkpoints_that_are_not_below_the_root_stay_and_this_is_said(tmp_path, capfd):
    """Their database is a copy, and the folders that it names are those of the original."""
    from studies.cost import retention

    queue, digests = finished(tmp_path)
    assert run(tmp_path, Limits(keep="none"), root="copy") == ""
    assert left(tmp_path) == [["10", "15", "20"]] * 2
    assert all(trial.user_attrs["checkpoint"] for trial in trials_of(tmp_path))
    line = (
        f"--keep=none deletes no checkpoints of 2 trials whose folders are not below --root={tmp_path}/copy, first "
        f"exp08-ema/a-off in {tmp_path}/runs/exp08-ema/a-off; give the --root that it was queued with"
    )
    assert capfd.readouterr().out.splitlines().count(line) == 1
    assert retention.elsewhere(queue, set(digests), Limits(), f"{tmp_path}/copy") == []
    assert retention.elsewhere(queue, set(digests), Limits(keep="none"), f"{tmp_path}/runs/") == []


@pytest.mark.slow
def test_workers_delete_when_a_trial_ends_and_a_failed_trial_keeps_what_it_resumes_from(tmp_path):
    write_plan(tmp_path, 2)
    assert run(tmp_path, Limits(keep="none"), workers=1).startswith("1: 2 trials failed")
    assert all(len(names) > 1 for names in left(tmp_path))
    queue = queue_of(tmp_path)
    digests = list(queue.latest())
    queue.retry(set(digests))
    assert run(tmp_path, Limits(keep="best", groups={"one": digests[:1], "two": digests}), workers=1) == ""
    first, second = trials_of(tmp_path)[2:]
    assert first.value < second.value and left(tmp_path)[2:] == [["20"], ["20"]], "each is the best of a group"


def test_a_deletion_that_was_cut_short_leaves_no_checkpoint_and_is_completed(tmp_path, monkeypatch):
    from studies.cost import retention

    queue, digests = finished(tmp_path)

    def cut_short(folder, mark):
        raise OSError("cut short")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "_erase", cut_short)
        lines = retention.enforce(queue, digests, Limits(keep="none"), f"{tmp_path}/runs")
    assert [line.endswith(" are not deleted: cut short; the next run tries again") for line in lines] == [True, True]
    assert [sum("unfinished" in name for name in names) for names in left(tmp_path)] == [1, 1]
    assert all(trial.user_attrs["checkpoint"] for trial in trials_of(tmp_path)), "they are not forgotten"
    assert run(tmp_path, Limits(keep="none"), workers=1) == "" and left(tmp_path) == [[], []]


def test_a_folder_in_a_bucket_is_listed_each_time():
    """Others write there: gcsfs by default lists a folder once."""
    with empty_bucket() as files:
        folder = CheckpointFolder("gs://runs/listed")
        for steps in ([1], [1, 2]):
            files.pipe(f"runs/listed/checkpoints/{steps[-1]}/state/array", b"x")
            assert folder.steps() == steps


def test_checkpoints_in_a_bucket_are_deleted(tmp_path):
    with empty_bucket() as files:
        for step in (1, 2):
            files.pipe(f"runs/mine/checkpoints/{step}/state/array", b"x")
        files.pipe("runs/mine/checkpoints/3/state/array", b"x")
        files.pipe("runs/mine/checkpoints/3.unfinished", b"")
        from studies.cost import retention

        folder = CheckpointFolder("gs://runs/mine")
        assert folder.steps() == [1, 2]
        retention.delete(folder, all_but_newest=True)
        assert [path.name for path in folder.place.iterdir()] == ["2"]
        retention.delete(folder, all_but_newest=False)
        assert folder.steps() == [] and folder.names() == set()


def test_what_a_trial_in_a_bucket_prints_is_kept_there(tmp_path):
    with empty_bucket() as files:
        from studies.worker import output_of

        for line in ("first attempt", "second attempt"):
            with output_of("gs://runs/mine") as output:
                subprocess.run(["echo", line], stdout=output, check=True)  # which writes without Python's buffer
                output.seek(0)
                assert output.read().decode().endswith(f"{line}\n")
        assert files.cat("runs/mine/output.txt") == b"first attempt\nsecond attempt\n"


def test_a_bucket_that_fails_ends_no_study(monkeypatch):
    """gcsfs raises an error that is not an OSError if the store answers with a failure."""
    from studies import progress, worker

    class Failing:
        def read_bytes(self):
            raise HttpError({"code": 503, "message": "backend error"})

        def write_bytes(self, content):
            self.read_bytes()

    for module in (progress, worker):
        monkeypatch.setattr(module, "path_of", lambda name: Failing())
    with worker.output_of("gs://runs/mine") as output:
        output.write(b"a line")
    progress.write("gs://runs/mine", [], None, 0)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "no answer"), HttpError({"code": 503, "message": "no answer"})])
def test_a_trial_is_complete_though_its_storage_did_not_answer_when_it_ended(tmp_path, monkeypatch, capfd, error):
    """Without an answer, the figures of the trial would look absent, and hours of training would end as a failure."""
    from studies import outcome, worker

    monkeypatch.setattr(worker.Worker, "beat_seconds", 0.01)
    monkeypatch.setattr(worker, "failures_of", lambda workdir: bucket.failures_of("gs://runs"))
    monkeypatch.setattr(outcome, "failures_of", worker.failures_of)
    read, answers = outcome.read_lines, iter([error, error])

    def read_later(path):
        for failure in answers:
            raise failure
        return read(path)

    monkeypatch.setattr(outcome, "read_lines", read_later)
    queue = queue_of(tmp_path)
    queue.enqueue(orders(tmp_path / "runs")[:1])
    task = worker.Task(f"sqlite:///{tmp_path}/studies.db", "s", list(queue.latest()), "eval_exact_accuracy", STAND_IN)
    worker.Worker(task).run()
    (trial,) = trials_of(tmp_path)
    assert trial.state.name == "COMPLETE" and starts(trial) == 1 and trial.user_attrs["failures"] == []
    assert capfd.readouterr().out.count("does not answer and is asked again") == 1


@pytest.mark.parametrize(("number", "kind"), [
    (errno.EIO, RunError), (errno.EACCES, ConfigError), (errno.ENOSPC, ConfigError),
])  # fmt: skip
def test_a_storage_that_never_answers_ends_the_worker_and_not_the_trial(tmp_path, monkeypatch, number, kind):
    """So does one that refuses, or is full: what a mended folder holds is read later."""
    from studies import outcome, worker

    def no_answer(path):
        raise OSError(number, "no answer")

    monkeypatch.setattr(worker.Worker, "beat_seconds", 0.01)
    monkeypatch.setattr(worker, "OUTAGE_SECONDS", 0.0)
    monkeypatch.setattr(outcome, "read_lines", no_answer)
    queue = queue_of(tmp_path)
    queue.enqueue(orders(tmp_path / "runs")[:1])
    task = worker.Task(f"sqlite:///{tmp_path}/studies.db", "s", list(queue.latest()), "eval_exact_accuracy", STAND_IN)
    with pytest.raises(kind, match=r"runs/.*no answer"):
        worker.Worker(task).run()
    assert trials_of(tmp_path)[0].state.name == "RUNNING", "the next worker completes it"


def test_a_bucket_that_does_not_answer_is_not_one_without_checkpoints():
    """A run would be begun again there, or another trial's continued."""

    class Silent:
        def __truediv__(self, name):
            return self

        def iterdir(self):
            raise OSError(errno.EIO, "no answer")

    with pytest.raises(OSError, match="no answer"):
        stored_config.trained_to(Silent())
