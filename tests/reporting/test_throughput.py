# SPDX-License-Identifier: Apache-2.0
"""Where the time of a run is booked, and what is said of the machine."""

import os
import subprocess
import sys
import time

import pytest

from reporting import clock as clocks
from reporting import throughput


@pytest.fixture
def turn(monkeypatch):
    """Turn a clock that stands until then; returns what it shows."""
    now = [100.0]
    monkeypatch.setattr(clocks.time, "monotonic", lambda: now[0])

    def by(seconds):
        now[0] += seconds

    return by


def one_step(clock, turn, data: float, rest: float):
    clock.enter("data")
    turn(data)
    clock.enter("step")
    clock.enter("wait")
    turn(rest)


def test_steps_count_and_compiling_evaluating_and_saving_do_not(turn):
    clock = clocks.Clock(100.0)
    speed = throughput.Speed(clock)
    turn(50)  # starting up
    for _ in range(4):
        one_step(clock, turn, 0.5, 1.5)
        speed.count(tokens=300, examples=10)
        with clock.within("save"):
            turn(3)
    figures = speed.interval(num_devices=5, flops_per_example=3e7, peak_flops=1e9)
    assert figures["step_seconds"] == 2.0
    assert figures["data_wait_seconds"] == 0.5
    assert figures["tokens_per_second"] == 150.0
    assert figures["tokens_per_second_per_device"] == 30.0
    assert figures["examples_per_second"] == 5.0
    assert figures["mfu"] == pytest.approx(5 * 3e7 / 1e9)  # though few of the tokens may be learned


def test_an_interval_begins_anew(turn):
    clock = clocks.Clock(100.0)
    speed = throughput.Speed(clock)
    one_step(clock, turn, 2, 4)
    speed.count(tokens=60, examples=1)
    speed.interval(1, 1.0, None)
    one_step(clock, turn, 1, 3)
    speed.count(tokens=80, examples=1)
    figures = speed.interval(1, 1.0, None)
    assert figures["tokens_per_second"] == 20.0 and figures["step_seconds"] == 4.0
    assert figures["mfu"] is None


def test_an_interval_without_steps_is_no_error(turn):
    assert throughput.Speed(clocks.Clock(100.0)).interval(1, 1.0, 1.0)["tokens_per_second"] == 0


def test_the_measured_peak_is_that_of_a_processor():
    assert 1e8 < throughput.measured_matmul_peak(size=256, repetitions=2) < 1e16


def test_the_peak_of_a_busy_machine_is_that_of_an_idle_one():
    """Else a run that starts beside other work reports an MFU of over 100 % when that work has ended."""
    alone = throughput.measured_matmul_peak(size=1024)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * os.cpu_count())]
    try:
        time.sleep(0.3)
        busy = throughput.measured_matmul_peak(size=1024)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert busy > 0.7 * alone  # by the wall clock it is a third of it


def test_memory_in_use_is_part_of_what_the_machine_has():
    used, total = throughput.host_memory_gib()
    assert 0.01 < used < total
