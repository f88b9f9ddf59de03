# SPDX-License-Identifier: Apache-2.0
"""The lines of the log about a step."""

import json
import math
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from objectives.objective import Objective
from reporting.clock import Clock
from reporting.display import Display
from reporting.goodput import Goodput
from reporting.metrics import MetricsWriter
from reporting.step_log import Diverged, StepLog, as_count
from tests.support import one_device_mesh


def logged(folder, *steps: dict, quiet: bool = True) -> list[dict]:
    """Return the lines of steps with these scalars, and with batches of 1 row, the first of a ramp to 2."""
    config = base.get_config()
    config.train.update(log_every=1, global_batch=2)
    run = types.SimpleNamespace(
        config=config, slow=False, mesh=one_device_mesh(), flops_per_example=1.0, objective=Objective()
    )
    clock = Clock(time.monotonic())
    clock.enter("wait")
    goodput = Goodput(clock, folder / "none.json", None)
    with MetricsWriter(folder) as writer, Display(len(steps), quiet=quiet) as display:
        log = StepLog(run, writer, display, goodput=goodput, peak_flops=None, most_flops=2.0, record=None)
        for step, scalars in enumerate(steps, start=1):
            figures = {"loss": 0.0, "gradient_norm": 0.0, "tokens": 4.0, "skipped": 0.0, "skipped_in_a_row": 0.0}
            log.add(step, {name: on_device(value) for name, value in (figures | scalars).items()}, rows=1)
        log.flush()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def test_the_loss_of_a_batch_in_which_nothing_counts_is_unknown(tmp_path):
    """As of a row of conversations whose answers are all cut off."""
    lines = logged(tmp_path, {}, {"tokens": 0.0})
    assert {line["step"]: line["loss"] for line in lines} == {1: 0.0, 2: None}


def test_a_figure_may_be_an_array_as_the_load_of_each_expert(tmp_path):
    """With four digits: a line has one number for each expert of each layer."""
    (line,) = logged(tmp_path, {"expert_load": [[1 / 3, 2 / 3], [0.5, 0.5]]})
    assert line["expert_load"] == [[0.3333, 0.6667], [0.5, 0.5]]


def test_a_number_of_an_array_that_is_not_finite_is_null(tmp_path):
    """NaN is not JSON."""
    (line,) = logged(tmp_path, {"expert_load": [0.5, math.nan, math.inf]})
    assert line["expert_load"] == [0.5, None, None]


@pytest.mark.parametrize("name", ["step", "kind", "event", "mfu", "total_tokens", "global_batch"])
def test_a_scalar_with_the_name_of_a_part_of_a_line_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"is called {name}, as a part of each line of metrics.jsonl; rename it"):
        logged(tmp_path, {name: 1.0})


class LateFigure:
    """A scalar on the device that takes a while to fetch."""

    def is_ready(self) -> bool:
        return True

    def copy_to_host_async(self) -> None:
        pass

    def __array__(self, dtype=None, copy=None):
        time.sleep(0.2)
        return np.asarray(0.0, dtype)


def on_device(value):
    return value if isinstance(value, LateFigure) else jnp.float32(value)


def test_a_step_takes_until_it_has_ended_however_long_its_figures_are_fetched(tmp_path):
    """They are fetched in a thread, while the next step runs already."""
    [line] = logged(tmp_path, {"late": LateFigure()})
    assert line["step_seconds"] < 0.1


def test_a_ramp_makes_the_time_left_the_least(tmp_path, capsys):
    logged(tmp_path, {}, {}, quiet=False)
    first, last = capsys.readouterr().out.splitlines()
    assert "  at least " in first and first.endswith(" left") and "left" not in last


@pytest.mark.parametrize(("weight", "count"), [(0.0, 0), (0.3, 1), (2.6, 3)])
def test_what_weighs_in_fractions_counts_as_a_token(weight, count):
    """Else the loss of a batch with little weight would be said to be unknown."""
    assert as_count(weight) == count


def test_the_rate_of_a_run_is_over_its_waits_for_data_too():
    goodput = types.SimpleNamespace(parts=lambda: {"training": 6.0, "data": 4.0, "evaluation": 5.0, "compile": 9.0})
    log = types.SimpleNamespace(goodput=goodput, total_tokens=300)
    assert StepLog.average_tokens_per_second(log) == 30.0


@pytest.mark.parametrize(("first", "was_finite"), [(9.0, True), (math.nan, False)])
def test_a_streak_with_a_step_that_was_not_finite_is_not_one_of_spikes(tmp_path, first, was_finite):
    """It needs another remedy, and begins with the first of its steps."""
    count = base.get_config().train.bad_steps
    steps = [
        {"loss": first if number == 1 else 9.0, "skipped": 1.0, "skipped_in_a_row": float(number)}
        for number in range(1, count + 1)
    ]
    with pytest.raises(Diverged) as error:
        logged(tmp_path, {}, *steps)
    assert error.value.was_finite is was_finite
    assert (error.value.first_step, error.value.last_step) == (2, 1 + count)
