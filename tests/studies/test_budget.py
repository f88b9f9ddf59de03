# SPDX-License-Identifier: Apache-2.0
"""A budget of chip-hours: what is claimed under it, by how many workers, and what happens when it is spent."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from studies import suites
from studies.cost.limits import Limits
from tests.studies.conftest import environment, needs_optuna
from tests.studies.test_queue import STAND_IN, members, orders, queue_of, starts, trials_of
from tests.support import ROOT

pytestmark = needs_optuna
CHIPS = 32  # of v4-64


def queued(folder, topology: str = "v4-64", **overrides: str):
    """Return the queue of two trials that wait, and their digests in order."""
    queue = queue_of(folder)
    queue.enqueue([order | {"topology": topology} for order in orders(folder / "runs", **overrides)])
    return queue, list(queue.latest())


def run(folder, limits: Limits, workers: int = 2, root: str = "runs") -> str:
    """Run the study of two trials with real workers; return the error that it ends with, "" for none."""
    from studies import launch
    from studies.worker import Task

    queue, digests = queued(folder)
    storage = f"sqlite:///{folder}/studies.db"
    try:
        task = Task(storage, "s", digests, "eval_exact_accuracy", STAND_IN, limits, f"{folder}/{root}")
        launch.run(queue, task, [{}] * workers)
    except (launch.Failed, launch.OutOfBudget, launch.Unfinished) as error:
        return f"{error.exit_status}: {error}"
    return ""


@pytest.mark.slow
def test_workers_end_before_the_budget_is_exceeded_and_go_on_with_a_larger_one(tmp_path, capfd):
    """Nothing is known of the first trial, so it runs alone. It takes more than the budget, and no other one starts."""
    said = run(tmp_path, Limits(budget=1e-6, price=0.0), workers=2)
    assert said.startswith("1: 1 trial is left: the budget of 0.00 chip-hours ends the queue: 0.0")
    assert said.endswith(" more; raise --budget to continue")
    assert "its chip-hours are not known; it runs alone to measure them" in capfd.readouterr().out
    done, waits = trials_of(tmp_path)
    assert (done.state.name, waits.state.name) == ("COMPLETE", "WAITING") and starts(done) == 1
    assert done.user_attrs["cost"] == 0.0, "0 is a price"
    assert done.user_attrs["chip_hours"] == pytest.approx(done.user_attrs["ran_seconds"] * CHIPS / 3600)
    assert run(tmp_path, Limits(budget=100.0), workers=1) == ""
    assert [trial.state.name for trial in trials_of(tmp_path)] == ["COMPLETE", "COMPLETE"]
    assert [starts(trial) for trial in trials_of(tmp_path)] == [1, 1], "a finished trial ran again"


def test_workers_that_claim_at_the_same_time_do_not_exceed_the_budget_together(tmp_path):
    from studies.cost import budget
    from studies.trials import order_of

    queue = queue_of(tmp_path)
    study, names = suites.find("exp08-ema", "mini")
    members = suites.members(study, names, seeds=4)
    queue.enqueue([order_of(member, str(tmp_path), "v4-64") for member in members])
    digests, claimed = set(queue.latest()), []
    limits = Limits(budget=5.0, rehearsed=dict.fromkeys(digests, 1.5))

    def claim(number: int) -> None:
        own = queue_of(tmp_path)
        own.claims.worker = f"machine{number} 1 1"
        if trial := budget.claim_next(own, digests, limits):
            claimed.append(trial.number)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claimed) == len(set(claimed)) == 3, "three times 1.5 chip-hours fit into 5"
    assert budget.reason_to_end(queue, digests, limits) == "", "others run, and may take less than was expected"


def test_a_group_waits_while_a_trial_of_another_group_may_leave_hours(tmp_path):
    """Nothing is known of the other trial: it runs alone to be measured, and the next group waits for that."""
    from studies.cost import budget

    queue, (first, second) = queued(tmp_path)
    limits = Limits(budget=2.0)
    other = budget.claim_next(queue, {first}, limits)
    assert budget.claim_next(queue, {second}, limits) is None
    assert budget.reason_to_end(queue, {second}, limits, waits=True) == ""
    too_long = dataclasses.replace(limits, rehearsed={second: 9.0})
    assert "no trial fits" in budget.reason_to_end(queue, {second}, too_long, waits=True), "it will never fit"
    assert "no trial fits" in budget.reason_to_end(queue, {second}, limits), "the workers have waited long enough"
    queue.set_attribute(other, "ran_seconds", 2.0 / CHIPS * 3600)
    assert "no trial fits" in budget.reason_to_end(queue, {second}, limits, waits=True), "nothing is left to wait for"


def test_a_trial_that_does_not_fit_makes_way_for_a_later_one_that_does(tmp_path):
    from studies.cost import budget

    queue, (first, second) = queued(tmp_path)
    limits = Limits(budget=2.0, rehearsed={first: 3.0, second: 1.0})
    trial = budget.claim_next(queue, {first, second}, limits)
    assert trial.user_attrs["digest"] == second
    queue.set_attribute(trial, "ran_seconds", 0.5 / CHIPS * 3600)
    account = budget.account(queue, limits)
    assert (account.spent, account.reserved) == pytest.approx((0.5, 0.5)), "half of it is still to come"
    queue.finish(trial, 1.0, {}, {})
    assert budget.reason_to_end(queue, {first, second}, limits) == (
        "the budget of 2.00 chip-hours ends the queue: 0.50 are spent, 1.50 are left, and no trial fits; "
        "all that are left take about 3.00 more; raise --budget to continue"
    )
    assert budget.left_of("budget", 2.0, queue, 0.0) == "budget: 2.00 chip-hours, 0.50 spent, 1.50 left ($0.00)"


def test_what_was_measured_takes_precedence_over_a_rehearsal_and_the_mean_of_others_is_last(tmp_path):
    from studies.cost import budget
    from studies.trials import order_of

    queue = queue_of(tmp_path)
    study, names = suites.find("exp08-ema", "mini")
    members = suites.members(study, names, seeds=2)  # a-off, its other seed, b-0.99, its other seed
    queue.enqueue([order_of(member, str(tmp_path), "") for member in members])
    digests = [member.digest for member in members]
    assert budget.Expectation(queue.everything(), {}).of(queue.latest()[digests[0]]) is None
    queue.finish(queue.claim_next({digests[0]}), 1.0, {"ran_seconds": 7200.0}, {})
    known = budget.Expectation(queue.everything(), {digests[1]: 5.0, digests[2]: 5.0})
    of = [known.of(queue.latest()[digest]) for digest in digests[1:]]
    assert of == [2.0, 5.0, 2.0], "measured with another seed; rehearsed; the mean of the study"


def test_hours_of_a_trial_that_was_retried_include_those_before(tmp_path):
    from studies.cost import budget

    queue, (first, second) = queued(tmp_path)
    queue.finish(queue.claim_next({first}), None, {"reason": "killed", "ran_seconds": 7200.0}, {})
    queue.retry({first})
    limits = Limits(budget=1000.0, rehearsed={first: 100.0, second: 100.0})
    again = queue.claim_next({first})
    assert budget.account(queue, limits).reserved == pytest.approx(100.0 - 2 * CHIPS)
    queue.finish(again, 0.5, {"ran_seconds": 3600.0}, {})
    assert budget.measured_hours(queue.latest().values(), "v4-64") == {first: pytest.approx(3.0)}
    assert budget.spent(queue) == pytest.approx(3.0 * CHIPS), "no hour counts twice"


def test_hours_and_cost_of_a_row_are_of_the_same_trials_and_the_time_left_of_whole_trials(tmp_path):
    """One trial took an hour and one has run for half of one, at the same price; half an hour is left."""
    from studies.report import summary

    queue, (first, second) = queued(tmp_path)
    account = {"ran_seconds": 3600.0, "wall_seconds": 3600.0, "chip_hours": float(CHIPS), "cost": 2.0 * CHIPS}
    queue.finish(queue.claim_next({first}), 1.0, account, {})
    queue.set_attribute(queue.claim_next({second}), "ran_seconds", 1800.0)
    study = suites.find("exp08-ema", "mini")[0]
    for price, cost in ((None, "$96.00"), (1.0, "$48.00")):
        *_, row, left = summary.lines(study, members(), queue.latest(), queue.running(), price)
        assert row.split()[-2:] == ["48.00", cost]
        assert left == "1 trial is left, about 30 min with 1 worker"


@pytest.mark.parametrize("running, waiting, seconds", [([], 3, 30.0), ([4.0, 7.0], 0, 7.0), ([4.0, 7.0], 3, 24.0)])
def test_the_time_left_is_that_of_whole_trials_of_a_worker(running, waiting, seconds):
    from studies.report import summary

    assert summary._until_idle(running, waiting, 10.0) == seconds


def test_the_time_left_is_that_of_the_workers_that_run_now():
    """One has half an hour left of its trial, and takes the other two after it."""
    from optuna.trial import TrialState

    from studies.report import summary

    done = types.SimpleNamespace(state=TrialState.COMPLETE, number=0, user_attrs={"wall_seconds": 3600.0})
    alive = types.SimpleNamespace(state=TrialState.RUNNING, number=1, user_attrs={"ran_seconds": 1800.0})
    assert summary._time_left([done, alive, None, None], {1}) == ["3 trials are left, about 2.5 h with 1 worker"]


def test_hours_of_a_retried_trial_without_an_account_include_those_before(tmp_path):
    """A folder in a bucket has no account, so the worker's count is all there is."""
    from studies.worker import Task, Worker

    queue, (first, _) = queued(tmp_path)
    queue.finish(queue.claim_next({first}), None, {"reason": "killed", "ran_seconds": 7200.0}, {})
    queue.retry({first})
    queue.set_attribute(queue.claim_next({first}), "ran_seconds", 3600.0)
    worker = Worker(Task(f"sqlite:///{tmp_path}/studies.db", "s", [first], "eval_exact_accuracy", STAND_IN))
    found = worker._outcome(queue.latest()[first])
    assert (found.chip_hours, found.ran_seconds) == (3.0 * CHIPS, 3600.0)


def test_hours_that_a_lost_database_had_counted_are_in_the_account_of_the_folder(tmp_path):
    from studies.cost import budget

    queue, (first, second) = queued(tmp_path)
    queue.finish(queue.claim_next({first}), 0.5, {"chip_hours": 4.0, "ran_seconds": 9.0}, {})
    queue.finish(queue.claim_next({second}), 0.5, {"chip_hours": 4.0, "ran_seconds": 3600.0}, {})
    assert [budget.taken_by(trial) for trial in queue.latest().values()] == [4.0, 1.0 * CHIPS]


def test_the_goodput_of_a_folder_without_heartbeats_is_that_of_its_last_event(tmp_path):
    """As in a bucket, to which a run sends no heartbeats; a process that is killed writes no event."""
    from studies import outcome

    parts = {"training": 30.0, "compile": 10.0, "idle": 99.0}
    events = [{"kind": "event", "event": "goodput", "time": 1.0 + half, "seconds": {
        part: seconds * half for part, seconds in parts.items()
    }} for half in (0.5, 1.0)]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    found = outcome.read(str(tmp_path), "v4-64", 20.0)
    assert (found.goodput, found.wall_seconds) == (0.75, 40.0)
    found = outcome.read(str(tmp_path), "v4-64", 20.0, ran_before=40.0)
    assert (found.goodput, found.wall_seconds) == (0.5, 60.0)


WORK = """
import json, sys
from studies.worker import Worker, task_of
Worker.beat_seconds = 0.5
Worker(task_of(json.loads(sys.argv[1]))).run()
"""


def test_a_trial_that_reaches_the_budget_saves_and_goes_back_to_the_queue(tmp_path):
    from studies.worker import Task

    queue, digests = queued(tmp_path, **{"train.steps": "1000"})  # 30 s
    task = Task(f"sqlite:///{tmp_path}/studies.db", "s", digests, "eval_exact_accuracy", STAND_IN, Limits(budget=1e-6))
    command = [sys.executable, "-c", WORK, json.dumps(dataclasses.asdict(task))]
    done = subprocess.run(command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, check=True)
    assert "exp08-ema/a-off saves and stops: the budget of 0.00 chip-hours is spent" in done.stdout
    first, second = trials_of(tmp_path)
    assert (first.state.name, second.state.name) == ("WAITING", "WAITING")
    saved = list((tmp_path / "runs").glob("*/*/checkpoints/*"))
    assert 0 < len(saved) < 1000 and not queue.claims.holders()
    assert first.user_attrs["ran_seconds"] > 0.5 and "ran_seconds" not in second.user_attrs


def test_the_time_of_a_killed_worker_counts_without_a_budget_too(tmp_path):
    """What ran up to the last beat before the kill is stored."""
    from studies.cost import budget
    from studies.worker import Task

    queue, digests = queued(tmp_path, **{"train.steps": "1000"})  # 30 s
    task = Task(f"sqlite:///{tmp_path}/studies.db", "s", digests, "eval_exact_accuracy", STAND_IN)
    command = [sys.executable, "-c", WORK, json.dumps(dataclasses.asdict(task))]
    with subprocess.Popen(command, cwd=ROOT, env=environment(tmp_path), start_new_session=True) as worker:
        deadline = time.monotonic() + 60
        while not any(trial.user_attrs.get("ran_seconds", 0.0) > 0.5 for trial in trials_of(tmp_path)):
            assert time.monotonic() < deadline and worker.poll() is None
            time.sleep(0.1)
        os.killpg(worker.pid, signal.SIGKILL)
    assert 0.5 < budget.spent(queue) * 3600 / CHIPS < 60


def test_a_trial_of_which_nothing_is_known_starts_only_when_no_other_one_runs(tmp_path):
    from studies.cost import budget

    queue, (known, unknown) = queued(tmp_path)
    limits = Limits(budget=5.0, rehearsed={known: 1.0})
    first = budget.claim_next(queue, {known, unknown}, limits)
    assert first.user_attrs["digest"] == known
    other = queue_of(tmp_path)
    other.claims.worker = "machine2 1 1"
    assert budget.claim_next(other, {known, unknown}, limits) is None
    queue.finish(first, 0.5, {"chip_hours": 1.0, "ran_seconds": 1.0}, {})
    assert budget.claim_next(other, {unknown}, limits).user_attrs["digest"] == unknown


def test_the_cost_of_trials_is_not_known_if_the_price_of_one_is_not():
    """A sum without it would be too low, and would not say so."""
    from studies.cost import budget

    known, unknown, waiting = (
        types.SimpleNamespace(user_attrs={"topology": topology, "ran_seconds": seconds})
        for topology, seconds in (("v4-8", 3600.0), ("", 3600.0), ("", 0.0))
    )
    assert budget.cost_of([known, waiting]) > 0 and budget.cost_of([known, unknown]) is None
    assert budget.cost_of([known, unknown], price=2.0) == pytest.approx(2.0 * (4 + 1))
