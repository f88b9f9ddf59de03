# SPDX-License-Identifier: Apache-2.0
"""The queue with real workers and a database on disk; a trial's program ends as a test planned."""

import contextlib
import json
import pathlib
import re
import signal
import sqlite3
import subprocess
import sys
import time
import types

import pytest

from configs import base
from configs.errors import ConfigError
from configs.group import Base
from settings import loading
from settings.keys import flat
from studies import suites
from tests.studies.conftest import ended, environment, needs_optuna
from tests.support import ROOT

pytestmark = needs_optuna
STAND_IN = (sys.executable, str(ROOT / "tests" / "studies" / "stand_in.py"))
RUN = """
import json, signal, sys
from configs.errors import ConfigError
from studies import launch, suites, trials
from studies.storage import open_storage
from studies.worker import Task
folder, seeds = sys.argv[1], int(sys.argv[2])
study, names = suites.find("exp08-ema", "mini")
queue = trials.Queue(open_storage(f"sqlite:///{folder}/studies.db", create=True), "s", "maximize", create=True)
members = suites.members(study, names, seeds=seeds, overrides={"train.steps": "20"})
signal.signal(signal.SIGTERM, signal.default_int_handler)
queue.enqueue([trials.order_of(m, suites.folder(folder + "/runs", m), "") for m in members])
try:
    digests = sorted({m.digest for m in members})
    launch.run(queue, Task(f"sqlite:///{folder}/studies.db", "s", digests, "eval_exact_accuracy",
               json.loads(sys.argv[3])), [{}, {}])
except (launch.Failed, launch.Unfinished) as end:
    sys.exit(str(end))
"""


def run(folder: pathlib.Path, seeds: int = 1) -> subprocess.Popen:
    """Start a study of 2 trials for each seed."""
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder), str(seeds), json.dumps(STAND_IN)], cwd=ROOT, text=True,
        env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run_here(folder: pathlib.Path) -> str:
    """Run the study of 2 trials from this process; return the error that it ends with, "" for none."""
    from studies import launch
    from studies.worker import Task

    queue = queue_of(folder)
    queue.enqueue(orders(folder / "runs"))
    try:
        url = f"sqlite:///{folder}/studies.db"
        launch.run(queue, Task(url, "s", sorted(queue.latest()), "eval_exact_accuracy", STAND_IN), [{}, {}])
    except (launch.Failed, launch.Unfinished) as error:
        return f"{error.exit_status}: {error}"
    return ""


def trials_of(folder: pathlib.Path) -> list:
    """Return the trials in the storage of a folder."""
    import optuna

    return optuna.load_study(study_name="s", storage=f"sqlite:///{folder}/studies.db").trials


def queue_of(folder: pathlib.Path):
    """Return the queue in a folder."""
    from studies.storage import open_storage
    from studies.trials import Queue

    return Queue(open_storage(f"sqlite:///{folder}/studies.db", create=True), "s", "maximize", create=True)


def starts(trial) -> int:
    """Return how often the program of a trial was started."""
    return len((pathlib.Path(trial.user_attrs["workdir"]) / "starts").read_text().splitlines())


def write_plan(folder: pathlib.Path, *statuses: int) -> None:
    """Let the first attempts of every trial end with these statuses."""
    (folder / "runs").mkdir()
    (folder / "runs" / "plan").write_text("\n".join(map(str, statuses)))


@pytest.mark.slow
def test_a_failed_trial_is_tried_three_times_and_then_shows_its_reason(tmp_path):
    write_plan(tmp_path, 1, 3, 1)
    assert run_here(tmp_path).startswith("1: 2 trials failed, first exp08-ema/a-off: error: as planned; ")
    for trial in trials_of(tmp_path):
        assert trial.state.name == "FAIL" and starts(trial) == 3
        assert [failure["status"] for failure in trial.user_attrs["failures"]] == [1, 3]
        assert (trial.user_attrs["status"], trial.user_attrs["reason"]) == (1, "error: as planned")
    queue = queue_of(tmp_path)
    assert queue.retry(set(queue.latest())) == 2
    assert run_here(tmp_path) == ""
    found = trials_of(tmp_path)
    assert [trial.state.name for trial in found] == ["FAIL", "FAIL", "COMPLETE", "COMPLETE"]
    for trial in found[2:]:
        assert trial.value == float(trial.user_attrs["changes"].get("optimizer.ema_decay", 1.0))
        assert [line["step"] for line in trial.user_attrs["evaluations"]] == list(range(1, 21)), "it went on"
    counts = [starts(trial) for trial in found]
    assert run_here(tmp_path) == "" and [starts(trial) for trial in found] == counts, "a finished trial ran again"


@pytest.mark.parametrize(
    ("status", "output", "reason"),
    [(1, b"step 1\nerror: as planned\n\n", "error: as planned"), (-9, b"", "ended by signal 9"),
     (1, b"\n", "it printed nothing")],
)  # fmt: skip
def test_a_failed_trial_says_why_also_if_its_program_printed_nothing(status, output, reason):
    from studies.worker import reason_of

    assert reason_of(status, output) == reason


@pytest.mark.slow
def test_a_mistake_in_the_configuration_is_not_tried_again_and_an_interruption_is_no_failure(tmp_path):
    write_plan(tmp_path, 75, 2)
    assert run_here(tmp_path).startswith("1: 2 trials failed")
    for trial in trials_of(tmp_path):
        assert starts(trial) == 2, "75 goes on from its checkpoint, and 2 is the end"
        assert trial.user_attrs["failures"] == [] and trial.user_attrs["status"] == 2


@pytest.mark.slow
def test_a_study_that_is_interrupted_saves_and_gives_its_trials_back(tmp_path):
    process = run(tmp_path)
    while not list(tmp_path.glob("runs/*/*/starts")):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)  # one that is repeated does not end what saves
    status, _, err = ended(process)
    assert status == 1 and "interrupted; " in err and "run the same command to continue" in err
    assert {trial.state.name for trial in trials_of(tmp_path)} <= {"WAITING", "COMPLETE"}
    assert not queue_of(tmp_path).claims.holders()


def members(**overrides: str) -> list[suites.Member]:
    """Return the two configurations of a group, with few steps."""
    study, names = suites.find("exp08-ema", "mini")
    return suites.members(study, names, overrides={"train.steps": "20"} | overrides)


def orders(folder: pathlib.Path, **overrides: str) -> list:
    """Return the orders of the two configurations of a group."""
    from studies.trials import order_of

    return [order_of(m, suites.folder(str(folder), m), "") for m in members(**overrides)]


def test_one_configuration_is_queued_once_and_cancelled_and_retried(tmp_path):
    queue = queue_of(tmp_path)
    assert queue.enqueue(orders(tmp_path)) == 2 and queue.enqueue(orders(tmp_path)) == 0
    digests = set(queue.latest())
    held = queue.claim_next(digests)
    other = queue_of(tmp_path)
    other.claims.worker = "another machine 1 1"
    assert other.cancel(digests) == (1, 1), "the waiting one ends, and the running one is asked"
    assert queue.keep(held), "its worker learns that it is cancelled"
    queue.finish(held, None, {"reason": "cancelled by sweep.py cancel"}, {})
    assert {trial.state.name for trial in queue.latest().values()} == {"FAIL"}
    assert queue.claim_next(digests) is None
    assert run_here(tmp_path) == "1: 2 trials cancelled; `sweep.py retry` queues them again"
    assert queue.retry(digests) == 2 and queue.claim_next(digests)


def test_a_trial_that_has_ended_is_read_once_and_others_each_time(tmp_path):
    """Every look read the curves of all trials of a study, which took seconds for a thousand of them."""
    queue, other = queue_of(tmp_path), queue_of(tmp_path)
    queue.enqueue(orders(tmp_path)[:1])
    queue.enqueue(orders(tmp_path)[1:])
    first, second = queue.latest()
    trial = other.claim_next({second})
    for status in (1, 2):
        other.set_attribute(trial, "status", status)
        assert queue.latest()[second].user_attrs["status"] == status
    other.finish(trial, 1.0, {"checkpoint": "20"}, {20: 1.0})
    ended = queue.latest()[second]
    assert (ended.value, ended.intermediate_values) == (1.0, {20: 1.0})
    assert queue.claim_next({first}).number == 0, "an earlier trial ends later"
    assert queue.latest()[first].state.name == "RUNNING" and queue.latest()[second] is ended
    queue.finish(queue.latest()[first], 0.5, {}, {})
    assert [one.state.name for one in queue.everything()] == ["COMPLETE", "COMPLETE"]
    queue.forget_checkpoint(ended)
    assert [one.latest()[second].user_attrs["checkpoint"] for one in (queue, queue_of(tmp_path))] == ["", ""]


def test_a_trial_that_ends_during_a_cancel_does_not_keep_the_others_from_it(tmp_path, monkeypatch):
    from studies.report import summary

    queue = queue_of(tmp_path)
    queue.enqueue(orders(tmp_path))
    before = queue.latest()
    claim, study = queue.claim_next(set(before)), suites.find("exp08-ema", "mini")[0]
    shown = summary.lines(study, members(), queue.latest(), queue.running())
    assert shown[2].split()[:4] == ["exp08-ema", "1", "1", "0"], "one is queued, and one is running"
    queue.finish(claim, 1.0, {}, {})
    monkeypatch.setattr(queue, "latest", lambda: before)
    assert queue.cancel(set(before)) == (1, 0)
    assert [trial.state.name for trial in trials_of(tmp_path)] == ["COMPLETE", "FAIL"]
    monkeypatch.undo()
    shown = summary.lines(study, members(), queue.latest(), queue.running())
    assert shown[2].split()[:7] == ["exp08-ema", "0", "0", "1", "0", "1", "0"], "a cancelled trial has not failed"
    assert not any(line.startswith("failed: ") for line in shown)


@pytest.mark.slow
def test_processes_that_begin_one_database_at_the_same_moment_all_open_it(tmp_path):
    begin = "import sys; from studies.storage import open_storage; from studies.trials import Queue; "
    begin += "sys.stdin.read(); Queue(open_storage(sys.argv[1], create=True), 's', 'maximize', create=True)"
    command = [sys.executable, "-c", begin, f"sqlite:///{tmp_path}/studies.db"]
    started = [subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) for _ in range(4)]
    time.sleep(3)  # all have imported
    for process in started:
        process.stdin.close()
    assert [process.wait() for process in started] == [0, 0, 0, 0]


def test_a_trial_that_is_interrupted_before_it_can_save_has_not_failed(tmp_path):
    from studies.worker import Task, Worker

    queue = queue_of(tmp_path)
    queue.enqueue(orders(tmp_path / "runs")[:1])
    asleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    worker = Worker(Task(f"sqlite:///{tmp_path}/studies.db", "s", list(queue.latest()), "eval_exact_accuracy", asleep))
    signal.signal(signal.SIGALRM, worker.stop)
    signal.alarm(2)
    worker.run()
    (trial,) = trials_of(tmp_path)
    assert trial.state.name == "WAITING" and trial.user_attrs["failures"] == []


def test_other_keys_in_the_folder_of_an_earlier_trial_are_refused(tmp_path):
    queue = queue_of(tmp_path)
    queue.enqueue(orders(tmp_path))
    others = orders(tmp_path, **{"optimizer.weight_decay": "0.3"})
    with pytest.raises(
        ConfigError, match=r"an earlier trial with optimizer\.weight_decay=0\.1, not 0\.3; type the keys"
    ):
        queue.enqueue(others)
    queue.cancel(set(queue.latest()))
    assert queue.enqueue(others) == 2, "nothing was trained"


def test_a_trial_that_goes_on_at_another_place_than_is_asked_for_is_named(tmp_path):
    """Its checkpoints are there. The trial of an equal configuration of another group is where it is expected."""
    from studies.trials import queued_elsewhere

    queue, known = queue_of(tmp_path), orders(tmp_path)
    queue.enqueue(known)
    equal = known[0] | {"group": "another", "configuration": "name", "workdir": f"{tmp_path}/another/name"}
    assert queued_elsewhere([*known, equal], queue.latest()) == []
    moved = [order | {"topology": "v4-8"} for order in orders(tmp_path / "moved")]
    lines = queued_elsewhere(moved, queue.latest())
    assert lines[0] == (
        f"exp08-ema/a-off goes on as it was queued, with --root={tmp_path}, not {tmp_path}/moved and "
        "--topology=, not v4-8"
    )
    queue.cancel(set(queue.latest()))
    assert len(lines) == 2 and queued_elsewhere(moved, queue.latest()) == []


def test_a_claim_has_one_holder_and_passes_on_when_its_holder_is_gone(tmp_path, monkeypatch):
    from studies import claims

    first, second = (queue_of(tmp_path).claims for _ in range(2))
    second.worker = "another machine 1 1"
    assert second.take("trial") and not first.take("trial"), "a living process of another machine holds it"
    clock = [0.0]
    monkeypatch.setattr(claims.time, "monotonic", lambda: clock[0])
    assert not first.take("trial")
    clock[0] = claims.STALE_SECONDS - 1
    assert second.keep("trial") and not first.take("trial"), "it counted up, so that the wait begins again"
    clock[0] = 2 * claims.STALE_SECONDS
    assert first.take("trial") and not second.keep("trial"), "the one that was thought gone learns that it lost it"
    ended_process = claims.this_process().rsplit(" ", 2)[0] + " 999999999 1"
    first.worker = ended_process
    assert first.take("mine")
    assert second.take("mine"), "a process of this machine that has ended loses its claims at once"


def test_a_lock_that_is_taken_again_and_one_that_is_held_for_long_have_one_holder(tmp_path, monkeypatch):
    from studies import claims

    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.01)
    first, second = queue_of(tmp_path), queue_of(tmp_path).claims
    first.claims.worker, lock = "another machine 1 1", f"{first.name}: enqueue"
    clock = [0.0]
    monkeypatch.setattr(claims.time, "monotonic", lambda: clock[0])
    for clock[0] in (0.0, 2 * claims.STALE_SECONDS):
        first.claims.take(lock)
        assert not second.take(lock), "it was given back and taken again meanwhile"
        first.claims.drop(lock)
    with first.locked():
        held = second.holders()[lock]
        assert not second.take(lock)
        deadline = time.time() + 30
        while second.holders()[lock] == held:
            assert time.time() < deadline, "nothing counts it up"
        clock[0] = 4 * claims.STALE_SECONDS
        assert not second.take(lock), "it is counted up while it is held"


def test_a_worker_that_stores_a_long_record_keeps_its_claim(tmp_path, monkeypatch):
    """A curve of thousands of points takes minutes, after which another worker would train the trial once more."""
    from studies import claims
    from studies.worker import Task, Worker

    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.01)
    queue = queue_of(tmp_path)
    queue.enqueue(orders(tmp_path / "runs")[:1])
    program = [sys.executable, "-c", ""]
    worker = Worker(Task(f"sqlite:///{tmp_path}/studies.db", "s", list(queue.latest()), "eval_exact_accuracy", program))
    finish = worker.queue.finish

    def finish_late(*arguments, **options):
        held, deadline = queue.claims.holders(), time.monotonic() + 30
        while queue.claims.holders() == held:
            assert time.monotonic() < deadline, "nothing counts it up"
        finish(*arguments, **options)

    monkeypatch.setattr(worker.queue, "finish", finish_late)
    worker.run()
    assert trials_of(tmp_path)[0].state.is_finished() and not queue.claims.holders()


def test_a_worker_whose_trial_another_one_has_ended_learns_that_it_lost_its_claim(tmp_path):
    """It goes on with the next trial; an error of Optuna would end it."""
    import optuna

    from studies.trials import LostClaim

    queue = queue_of(tmp_path)
    queue.enqueue(orders(tmp_path))
    trial = queue.claim_next(set(queue.latest()))
    queue.storage.set_trial_state_values(queue.id_of(trial), optuna.trial.TrialState.FAIL)
    for write in (
        lambda: queue.finish(trial, 1.0, {}, {}),
        lambda: queue.finish(trial, 1.0, {}, {20: 0.5}),
        lambda: queue.give_back(trial),
        lambda: queue.set_attribute(trial, "ran_seconds", 1.0),
    ):
        with pytest.raises(LostClaim, match="another worker has ended exp08-ema/a-off"):
            write()


def test_a_search_trial_whose_worker_dies_while_it_is_adopted_is_never_run(tmp_path, monkeypatch):
    import optuna

    queue = queue_of(tmp_path)
    order = next(iter(orders(tmp_path)))
    written = []

    def set_user_attr(trial, name, content):
        assert not queue.everything(), f"a trial with {written} would be run"
        written.append(name)
        original(trial, name, content)

    original = optuna.Trial.set_user_attr
    monkeypatch.setattr(optuna.Trial, "set_user_attr", set_user_attr)
    study = optuna.load_study(study_name=queue.name, storage=queue.storage)
    adopted = queue.adopt(study.ask(), order)
    assert written[-1] == "digest" and [trial.number for trial in queue.everything()] == [adopted.number]


def test_a_database_that_another_program_keeps_locked_is_out_of_reach(tmp_path, monkeypatch):
    """SQLAlchemy and Optuna say it in different words; the same command continues."""
    from studies import storage

    monkeypatch.setattr(storage, "WAIT_SECONDS", 0.1)
    queue = queue_of(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "studies.db")) as other:
        other.execute("BEGIN EXCLUSIVE")
        for use in (queue.latest, lambda: queue.claims.take("x")):
            with pytest.raises(storage.OutOfReach, match="locked; run the same command") as error, storage.reaching():
                use()
            assert error.value.exit_status == 75
        with pytest.raises(storage.OutOfReach, match="locked"):
            queue_of(tmp_path)


def test_a_database_that_cannot_be_written_is_a_mistake():
    """The same command would not continue."""
    from sqlalchemy import exc

    from studies import storage

    error = exc.OperationalError("UPDATE", {}, sqlite3.OperationalError("attempt to write a readonly database"))
    with pytest.raises(ConfigError, match="--storage is a file that cannot be written here"), storage.reaching():
        raise error


def test_a_damaged_database_is_one_line():
    """Optuna's own message says that a text is too long."""
    import optuna
    from sqlalchemy import exc

    from studies import storage

    error = exc.DatabaseError("SELECT", {}, sqlite3.DatabaseError("database disk image is malformed"))
    said = "--storage is damaged: database disk image is malformed; restore the file"
    with pytest.raises(ConfigError, match=said), storage.reaching():
        raise error
    with pytest.raises(ConfigError, match="--storage is damaged"), storage.reaching():
        raise optuna.exceptions.StorageInternalError("exceeding max length") from error
    with pytest.raises(exc.IntegrityError), storage.reaching():
        raise exc.IntegrityError("INSERT", {}, sqlite3.IntegrityError("UNIQUE constraint failed"))


def test_a_worker_whose_database_has_gone_away_is_told_apart_from_a_mistyped_address():
    """The command that started the worker has used it."""
    from studies import storage

    gone = "postgresql://nobody@127.0.0.1:1/x"
    with pytest.raises(storage.OutOfReach, match="run the same command to continue"):
        storage.open_storage(gone, create=False, is_known=True)
    with pytest.raises(ConfigError, match=r"cannot be used: .*; use sqlite:///studies"):
        storage.open_storage(gone, create=False)


def test_a_folder_with_the_run_of_another_study_is_not_continued(tmp_path):
    """As after the database was deleted, or another one was named, and the folders were not."""
    order = orders(tmp_path / "runs")[0]
    folder = pathlib.Path(order["workdir"])
    (folder / "checkpoints" / "10").mkdir(parents=True)
    (folder / "trial.json").write_text(json.dumps(order["config"] | {"train.steps": 10}))
    said = run_here(tmp_path)
    first, second = sorted(trials_of(tmp_path), key=lambda trial: trial.user_attrs["workdir"] != str(folder))
    assert (first.state.name, second.state.name) == ("FAIL", "COMPLETE"), said
    assert first.user_attrs["reason"] == (
        f"{folder} has the run of another trial (train.steps 10 -> 20); move that folder away and run `sweep.py "
        "retry`, or give a search another --name"
    )
    assert not (folder / "starts").exists()


@pytest.mark.parametrize(("keys", "has_summary", "state", "num_starts"), [
    ({"train.steps": 10}, True, "FAIL", 0), ({}, True, "COMPLETE", 0), ({}, False, "COMPLETE", 1),
])  # fmt: skip
def test_a_finished_run_without_checkpoints_is_not_begun_again(tmp_path, keys, has_summary, state, num_starts):
    """`--keep` deleted them. A run that died before its first save begins again."""
    from studies.worker import Task, Worker

    (order,) = orders(tmp_path / "runs")[:1]
    folder = pathlib.Path(order["workdir"])
    folder.mkdir(parents=True)
    (folder / "trial.json").write_text(json.dumps(order["config"] | keys))
    (folder / "metrics.jsonl").write_text('{"kind": "eval", "step": 20, "eval_exact_accuracy": 0.25}\n')
    if has_summary:
        (folder / "summary.txt").write_text("held-out exact: 25%")
    queue = queue_of(tmp_path)
    queue.enqueue([order])
    Worker(Task(f"sqlite:///{tmp_path}/studies.db", "s", list(queue.latest()), "eval_exact_accuracy", STAND_IN)).run()
    (trial,) = trials_of(tmp_path)
    assert (trial.state.name, (folder / "starts").exists()) == (state, bool(num_starts))
    if keys:
        assert "has the run of another trial (train.steps 10 -> 20)" in trial.user_attrs["reason"]
        assert json.loads((folder / "trial.json").read_text())["train.steps"] == 10
    elif has_summary:
        assert trial.value == 0.25


def test_a_trial_whose_recipe_was_edited_is_not_begun(tmp_path):
    """Its process would train what the database and the report do not know, and a search would rank it."""
    from studies.trials import order_of
    from studies.worker import Task, Worker

    recipe = tmp_path / "mine.py"
    text = "from configs import tiny\n\ndef get_config():\n    config = tiny.get_config()\n"
    recipe.write_text(f"{text}    return config\n")
    member = suites.member_of(Base(str(recipe)), loading.run_recipe(str(recipe)), "g", "one", {}, "", {})
    queue = queue_of(tmp_path)
    queue.enqueue([order_of(member, str(tmp_path / "runs"), "")])
    recipe.write_text(f"{text}    config.train.steps = 7\n    return config\n")
    task = Task(f"sqlite:///{tmp_path}/studies.db", "s", list(queue.latest()), "eval_exact_accuracy", STAND_IN)
    was = member.values["train.steps"]
    line = f"{recipe} is not what it was when g/one was queued (train.steps {was} -> 7); undo the edit"
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}"):
        Worker(task).run()
    assert not (tmp_path / "runs").exists()
    recipe.write_text(f"{text}    config.data.cache_dir = '/elsewhere'\n    return config\n")  # as on another machine
    Worker(task).run()
    assert [trial.state.name for trial in trials_of(tmp_path)] == ["COMPLETE"]


@pytest.mark.parametrize(("keys", "is_other"), [
        ({}, False), ({"train.steps": 20}, True), ({"train.steps": 0, "train.tokens": 10**5}, True),
        ({"train.spike_deviations": 3.0}, True), ({"data.cache_dir": "elsewhere"}, False),
    ])  # fmt: skip
def test_a_run_with_other_keys_is_that_of_another_trial(tmp_path, keys, is_other):
    """Also where a length in tokens differs; the run stores it in steps."""
    from studies.mismatch import other_run_in_folder

    config = flat(base.get_config()) | {"train.tokens": 10**4}
    about = {"workdir": str(tmp_path), "config": config | keys}
    about["changes"] = dict.fromkeys(keys, "")
    (tmp_path / "config.json").write_text(json.dumps(config | {"train.steps": 77, "train.tokens": 0}))
    of_run = other_run_in_folder(types.SimpleNamespace(user_attrs=about))
    assert bool(of_run) == bool(keys.get("train.steps")), "of a run that no trial began, as of an earlier version"
    (tmp_path / "trial.json").write_text(json.dumps(config))
    assert bool(other_run_in_folder(types.SimpleNamespace(user_attrs=about))) == is_other
