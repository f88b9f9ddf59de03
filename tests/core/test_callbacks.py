# SPDX-License-Identifier: Apache-2.0
"""What the loop does with the answers of callbacks, and with callbacks that fail."""

import concurrent.futures
import contextlib
import re
import types

import pytest

import train
from cluster import processes
from cluster.blame import Heartbeat
from cluster.hub import ACTING
from configs import base
from core.callbacks import Callback, Reshard, RollBack, Save, Stop, Stopped, as_list, check_all_act
from core.evaluators import Evaluator
from core.job import Job
from tests.hubs import members
from training.compiled_steps import Shape

PRESENT = Shape(16, (1, 1, 8, 1, 1, 1))


class Answers(Callback):
    def __init__(self, answer):
        self.answer = answer

    def on_step(self, job, state, step):
        return self.answer


def asked(*answers):
    job = types.SimpleNamespace(
        callbacks=[Answers(answer) for answer in answers],
        callback_seconds=0.0,
        stages=types.SimpleNamespace(shape=lambda step: PRESENT),
    )
    return Job.ask_callbacks(job, None, 1)


def test_actions_are_taken_and_nothing_else_is_passed_over():
    """A mistake would else be a run that is never stopped, or one whose batches do not fit its mesh."""
    assert asked(None, Save(), Stop("a"), Reshard(PRESENT), Stop("b")) == {
        Save: Save(), Stop: Stop("b"), Reshard: Reshard(PRESENT),
    }  # fmt: skip
    for answer in ("stop", Stop, True, {}):
        with pytest.raises(TypeError, match=r"Answers.on_step returned .*; it must return None, Save"):
            asked(answer)
    for first_step in (0, 2):
        with pytest.raises(ValueError, match="first_step must be from 1 to 1, the present step"):
            asked(RollBack("bad data", first_step))
    for shape in (PRESENT._replace(rows=8), PRESENT._replace(mesh=(1, 2, 4, 1, 1, 1))):
        with pytest.raises(ValueError, match=r"use the keys batch.ramp and layout.changes"):
            asked(Reshard(shape))


def acts(member, number: int, step: int, names: str) -> list:
    return member.line.gather(ACTING, [number, step, names])


def test_a_process_whose_callbacks_act_alone_is_named():
    """As by its own clock: it would wait in its save for the others, and they for it in the next step."""
    hubs = []
    group = members(3, hubs)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda member: acts(member, 20, 5, "Save"), group))
        waiting = pool.submit(acts, group[1], 24, 6, "Save")
        for step, number in ((6, 25), (9, 23), (7, 25)):  # still there, before a roll back, and one step on
            assert not group[1].ended.wait(0.2) and not waiting.done()
            group[0].line.send_heartbeat(vars(Heartbeat(0, "a", "wait", step, number, 0.0, {})))
        assert all(member.ended.wait(5) for member in group)
        line, status = group[2].end
        names = r"callbacks returned Save after step 6 in process 1 \(.*\), and nothing in process 0 \(.*\); they .*"
        assert status == 1 and re.fullmatch(names, line)
        for member in (group[0], group[2]):  # so that the thread of the one that waits ends
            pool.submit(acts, member, 24, 6, "Save")
    for member in group:
        member.line.leaving = True
        member.line.connection.shutdown(2)
    hubs[0].close(0.1)


@pytest.mark.parametrize("theirs", [[20, 5, "Stop"], [24, 6, "Save"]])
def test_processes_whose_callbacks_act_differently_end(monkeypatch, theirs):
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "gather", lambda topic, value: [value, theirs])
    job = types.SimpleNamespace(clock=types.SimpleNamespace(number=20), config=base.get_config())
    message = f"returned {theirs[2]} after step {theirs[1]} in process 1, but Save after step 5 in process 0; they must"
    with pytest.raises(ValueError, match=message):
        check_all_act({Save: Save()}, job, 5)
    job.config.train.steps = 5  # after which all save
    check_all_act({Save: Save()}, job, 5)
    job.config.train.steps = 6
    monkeypatch.setattr(processes, "gather", lambda topic, value: [value, [22, *value[1:]]])
    check_all_act({Save: Save()}, job, 5)


@pytest.mark.parametrize("raised", [Stopped("pruned"), Stopped(""), ValueError("a bug")])
def test_every_callback_learns_the_end_though_the_first_fails_at_it(monkeypatch, raised):
    ends = []

    class Ends(Callback):
        def on_end(self, job, *, has_failed):
            ends.append(has_failed)
            if len(ends) == 1:
                raise OSError("the first fails")

    def stop(job, record):
        raise raised

    monkeypatch.setattr(train, "train_with_roll_backs", stop)
    monkeypatch.setattr(train, "HeartbeatFile", lambda *unused: contextlib.nullcontext())
    log = types.SimpleNamespace(account=lambda: None, close=lambda: ends.append("log"))
    steps = types.SimpleNamespace(close=lambda: ends.append("steps"))
    callbacks = [Ends(), Ends()]
    job = types.SimpleNamespace(workdir=None, log=log, corpus=None, callbacks=callbacks, compiled_steps=steps)
    with pytest.raises(OSError, match="the first fails"):
        train.run_job(job, None)
    assert ends == [*[not isinstance(raised, Stopped)] * 2, "steps", "log"]


def test_what_is_no_callback_is_named():
    given = [Answers(None)]
    assert as_list("callbacks", given, Callback) == given
    for wrong in (print, Callback):
        with pytest.raises(TypeError, match=r"^callbacks: .* is not an object of a subclass of Callback"):
            as_list("callbacks", [Answers(None), wrong], Callback)


def test_what_is_no_list_of_callbacks_or_evaluators_is_named_before_anything_is_read(tmp_path):
    for given, message in (
        ({"callbacks": None}, "callbacks=None is not a list; give a list of objects of a subclass of Callback"),
        ({"callbacks": Answers(None)}, "callbacks=<.*Answers object .* is not a list"),
        ({"evaluators": None}, "evaluators=None is not a list; give a list of objects of a subclass of Evaluator"),
        ({"evaluators": Evaluator()}, "evaluators=<.*Evaluator object .* is not a list"),
    ):
        with pytest.raises(TypeError, match=message):
            train.train(base.get_config(), tmp_path / "run", **given)
    given = [Answers(None)]
    assert as_list("callbacks", iter(given), Callback) == given
