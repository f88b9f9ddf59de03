# SPDX-License-Identifier: Apache-2.0
"""Learning rates at the corners of their schedules."""

import numpy as np
import pytest

from configs import base
from tests.support import assert_close
from training import schedules

NAMES = ("cosine", "linear", "warmup_stable_decay", "constant")


def rates(name: str, steps: list[int], num_steps: int, warmup_steps: int, **changes) -> list[float]:
    config = base.get_config().optimizer
    config.update(dict(learning_rate=2.0, warmup_steps=warmup_steps, final_fraction=0.25) | changes)
    schedule = getattr(schedules, name)(config, num_steps)
    return [float(schedule(step)) for step in steps]


@pytest.mark.parametrize(
    ("name", "middle", "end"), [("cosine", 1.25, 0.5), ("linear", 1.25, 0.5), ("constant", 2, 2)]
)  # fmt: skip
def test_it_rises_from_zero_peaks_after_warmup_and_ends_at_its_fraction(name, middle, end):
    assert_close(rates(name, [0, 5, 10, 60, 110, 500], 110, 10), [0, 1, 2, middle, end, end])


def test_linear_and_cosine_differ_between_their_corners():
    assert_close(rates("linear", [35], 110, 10), [1.625])
    assert_close(rates("cosine", [35], 110, 10), [2 * (0.25 + 0.75 * (1 + np.cos(np.pi / 4)) / 2)])


def test_warmup_stable_decay_stays_at_the_peak_and_falls_by_one_minus_sqrt():
    """Over the last 40 of 110 steps: a quarter of the way down it has lost half of what it loses."""
    values = rates("warmup_stable_decay", [0, 5, 10, 69, 70, 80, 110, 200], 110, 10, cooldown_fraction=40 / 110)
    assert_close(values, [0, 1, 2, 2, 2, 2 - 1.5 / 2, 0.5, 0.5])


def test_a_longer_run_takes_warmup_stable_decay_up_before_its_fall():
    before = [step for step in range(0, 160, 10)]
    assert rates("warmup_stable_decay", before, 200, 10) == rates("warmup_stable_decay", before, 400, 10)


@pytest.mark.parametrize("name", NAMES)
def test_without_warmup_it_begins_at_the_peak(name):
    assert_close(rates(name, [0], 100, 0), [2])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_steps", [3, 10])
def test_a_run_no_longer_than_its_warmup_only_rises(name, num_steps):
    values = rates(name, list(range(num_steps)), num_steps, 10)
    assert_close(values, [0.2 * step for step in range(num_steps)])
