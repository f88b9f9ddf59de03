# SPDX-License-Identifier: Apache-2.0
"""Every second of a run is in one part of its account, for any number of processes and restarts."""

import json

import pytest

from reporting.clock import PHASES, Clock
from reporting.goodput import Goodput


class Time:
    """Advances only by `sleep`, so that a busy machine changes nothing."""

    now, offset = 1000.0, 1e9

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.offset + self.now


time = Time()


@pytest.fixture(autouse=True)
def still(monkeypatch):
    monkeypatch.setattr(time, "offset", Time.offset)
    monkeypatch.setattr("reporting.clock.time", time)
    monkeypatch.setattr("reporting.goodput.time", time)


def spend(clock: Clock, **seconds: float) -> None:
    """Be in phases for some seconds each."""
    for phase, length in seconds.items():
        clock.enter(phase)
        time.sleep(length)


def check_sum(goodput: Goodput) -> dict:
    parts = goodput.parts()
    assert sum(parts.values()) == pytest.approx(goodput.wall_seconds())
    return parts


def test_the_parts_of_one_process_sum_to_its_time(tmp_path):
    clock = Clock(time.monotonic() - 1.0)
    goodput = Goodput(clock, tmp_path / "none.json", None)
    spend(clock, compile=0.05, data=0.02, step=0.03, wait=0.04, evaluation=0.05, save=0.06)
    clock.enter("start_up")
    parts = check_sum(goodput)
    wanted = {"start_up": 1.0, "compile": 0.05, "training": 0.07, "data": 0.02, "evaluation": 0.05, "checkpoint": 0.06}
    for part, seconds in wanted.items():
        assert parts[part] == pytest.approx(seconds), part
    assert goodput.fraction() == pytest.approx(parts["training"] / 1.25)


def test_every_phase_belongs_to_one_part_and_rollouts_are_training(tmp_path):
    clock = Clock(time.monotonic())
    goodput = Goodput(clock, tmp_path / "none.json", None)
    spend(clock, **dict.fromkeys(PHASES, 1.0))
    clock.enter("start_up")
    assert check_sum(goodput)["training"] == pytest.approx(3.0)  # rollout, step, wait


def test_a_restart_books_what_was_done_since_the_checkpoint_as_lost_and_the_time_between_as_idle(tmp_path):
    sign = tmp_path / "0.json"
    clock = Clock(time.monotonic())
    first = Goodput(clock, sign, None)
    spend(clock, wait=0.1)
    saved = json.loads(json.dumps(first.record()))
    spend(clock, evaluation=0.05, wait=0.2)
    sign.write_text(json.dumps({"seconds": first.record()}))
    trained = first.parts()["training"]
    time.sleep(0.15)  # dead
    clock = Clock(time.monotonic())
    second = Goodput(clock, sign, saved)
    spend(clock, wait=0.05)
    parts = check_sum(second)
    assert parts["lost"] == pytest.approx(trained - saved["parts"]["training"]) and parts["lost"] > 0.15
    assert parts["idle"] == pytest.approx(0.15)
    assert parts["training"] == pytest.approx(saved["parts"]["training"] + 0.05)


@pytest.mark.parametrize("torn", [None, "", '{"seco'])
def test_without_a_sign_of_life_the_checkpoint_tells_where_to_go_on(tmp_path, torn):
    if torn is not None:
        (tmp_path / "0.json").write_text(torn)
    clock = Clock(time.monotonic())
    saved = Goodput(clock, tmp_path / "0.json", None).record()
    time.sleep(0.1)
    parts = check_sum(Goodput(Clock(time.monotonic()), tmp_path / "0.json", saved))
    assert parts["idle"] == pytest.approx(0.1)


def test_going_back_within_a_process_loses_what_is_done_again(tmp_path):
    clock = Clock(time.monotonic())
    goodput = Goodput(clock, tmp_path / "none.json", None)
    spend(clock, data=0.02, wait=0.05)
    saved = goodput.record()["parts"]
    spend(clock, data=0.04, wait=0.1)
    goodput.lost_since(saved)
    parts = check_sum(goodput)
    assert parts["lost"] == pytest.approx(0.14)
    assert parts["training"] == pytest.approx(0.05) and parts["data"] == pytest.approx(0.02)


def test_a_clock_that_is_set_back_during_a_run_changes_nothing(tmp_path):
    clock = Clock(time.monotonic())
    goodput = Goodput(clock, tmp_path / "none.json", None)
    spend(clock, wait=0.1)
    time.offset -= 3600
    spend(clock, evaluation=0.1)
    clock.enter("start_up")
    parts = check_sum(goodput)
    assert goodput.wall_seconds() == pytest.approx(0.2) and goodput.fraction() == pytest.approx(0.5)
    assert min(parts.values()) >= 0 and "50.0%" in goodput.line()


def test_a_clock_that_was_set_back_between_two_processes_makes_no_time_negative(tmp_path):
    clock = Clock(time.monotonic())
    first = Goodput(clock, tmp_path / "0.json", None)
    spend(clock, wait=0.1)
    saved = json.loads(json.dumps(first.record()))
    spend(clock, wait=0.1)
    (tmp_path / "0.json").write_text(json.dumps({"seconds": first.record()}))
    time.offset -= 3600
    clock = Clock(time.monotonic())
    second = Goodput(clock, tmp_path / "0.json", saved)
    spend(clock, wait=0.2)
    clock.enter("start_up")
    parts = check_sum(second)
    assert parts["idle"] == 0 and parts["lost"] == pytest.approx(0.1) and parts["training"] == pytest.approx(0.3)
    assert second.record()["time"] >= first.record()["time"]  # which the next process compares


@pytest.mark.parametrize("jump", [-3600, 3600, 50 * 365 * 86_400])
def test_a_clock_that_is_set_during_a_process_is_no_idle_time_of_the_next(tmp_path, jump):
    """As on a machine that starts in 1970, until it asks the network for the time."""
    clock = Clock(time.monotonic())
    first = Goodput(clock, tmp_path / "0.json", None)
    spend(clock, wait=0.1)
    time.offset += jump
    spend(clock, save=0.1)
    clock.enter("start_up")
    (tmp_path / "0.json").write_text(json.dumps({"seconds": first.record()}))
    time.sleep(5.0)
    second = Goodput(Clock(time.monotonic()), tmp_path / "0.json", None)
    # Unix seconds are rounded to some 1e-7 s.
    assert check_sum(second)["idle"] == pytest.approx(5.0) and second.wall_seconds() == pytest.approx(5.2, abs=1e-6)


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000, "[]", "{}", '{"seconds": 3}', '{"seconds": {"began": "x", "time": 0, "parts": {}}}',
        '{"seconds": {"began": 0, "time": NaN, "parts": {}}}',
        '{"seconds": {"began": 0, "time": 0, "parts": {"step": []}}}',
    ],
)  # fmt: skip
def test_a_damaged_sign_of_life_is_none(tmp_path, content):
    (tmp_path / "0.json").write_text(content)
    clock = Clock(time.monotonic())
    goodput = Goodput(clock, tmp_path / "0.json", None)
    spend(clock, wait=0.1)
    assert check_sum(goodput)["training"] == pytest.approx(0.1)


def test_an_account_without_a_part_of_this_version_has_nothing_there(tmp_path):
    saved = {"began": time.time() - 5, "time": time.time() - 1, "parts": {"training": 4.0, "older": 1.0}}
    parts = check_sum(Goodput(Clock(time.monotonic()), tmp_path / "none.json", saved))
    assert parts["training"] == 4.0 and parts["idle"] == pytest.approx(1.0) and "older" not in parts
