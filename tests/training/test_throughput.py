# SPDX-License-Identifier: Apache-2.0
"""Where the time of a run is booked, and what is said of the machine."""

import pytest

from training import throughput


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands until it is turned."""
    now = [100.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])

    def turn(seconds):
        now[0] += seconds

    return turn


def waiting(clock, seconds):
    """Yield batches that take a while to come."""
    while True:
        clock(seconds)
        yield {}


def test_steps_count_and_compiling_evaluating_and_saving_do_not(clock):
    watch = throughput.Stopwatch()
    clock(50)  # compiling
    watch.skip()
    batches = waiting(clock, 0.5)
    for _ in range(4):
        watch.next(batches)
        clock(1.5)
        watch.mark(tokens=300, examples=10)
    clock(12)  # saving
    watch.skip()
    figures = watch.interval(num_devices=5, flops_per_example=3e7, peak_flops=1e9)
    assert figures["step_seconds"] == 2.0
    assert figures["data_wait_seconds"] == 0.5
    assert figures["tokens_per_second"] == 150.0
    assert figures["tokens_per_second_per_device"] == 30.0
    assert figures["examples_per_second"] == 5.0
    assert figures["mfu"] == pytest.approx(5 * 3e7 / 1e9)  # though few of the tokens may be learned


def test_an_interval_begins_anew(clock):
    watch = throughput.Stopwatch()
    clock(6)
    watch.mark(tokens=60, examples=1)
    watch.interval(1, 1.0, None)
    clock(4)
    watch.mark(tokens=80, examples=1)
    figures = watch.interval(1, 1.0, None)
    assert figures["tokens_per_second"] == 20.0 and figures["step_seconds"] == 4.0
    assert figures["mfu"] is None


def test_an_interval_without_steps_is_no_error(clock):
    assert throughput.Stopwatch().interval(1, 1.0, 1.0)["tokens_per_second"] == 0


def test_the_measured_peak_is_that_of_a_processor():
    assert 1e8 < throughput.measured_matmul_peak(size=256, repetitions=2) < 1e16


def test_memory_in_use_is_part_of_what_the_machine_has():
    used, total = throughput.host_memory_gib()
    assert 0.01 < used < total
