# SPDX-License-Identifier: Apache-2.0
"""The learning rate at the corners of its schedule."""

import pytest

from configs import base
from tests.support import assert_close
from training import schedules


def rates(steps: list[int], num_steps: int, warmup_steps: int) -> list[float]:
    config = base.get_config().optimizer
    config.update(learning_rate=2.0, warmup_steps=warmup_steps, final_fraction=0.25)
    schedule = schedules.cosine(config, num_steps)
    return [float(schedule(step)) for step in steps]


def test_cosine_rises_from_zero_peaks_after_warmup_and_ends_at_its_fraction():
    assert_close(rates([0, 5, 10, 60, 110, 500], num_steps=110, warmup_steps=10), [0, 1, 2, 1.25, 0.5, 0.5])


def test_without_warmup_it_begins_at_the_peak():
    assert_close(rates([0, 50, 100], num_steps=100, warmup_steps=0), [2, 1.25, 0.5])


@pytest.mark.parametrize("num_steps", [3, 10])
def test_a_run_no_longer_than_its_warmup_only_rises(num_steps):
    values = rates(list(range(num_steps)), num_steps, warmup_steps=10)
    assert_close(values, [0.2 * step for step in range(num_steps)])
