# SPDX-License-Identifier: Apache-2.0
"""What is told of a step."""

import json
import types

import jax.numpy as jnp

from configs import base
from reporting.clock import Clock
from reporting.display import Display
from reporting.goodput import Goodput
from reporting.metrics import MetricsWriter
from reporting.step_log import StepLog
from tests.support import one_device_mesh


def test_the_loss_of_a_batch_in_which_nothing_counts_is_unknown(tmp_path):
    """As of a row of conversations whose answers are all cut off."""
    config = base.get_config()
    config.train.log_every = 1
    run = types.SimpleNamespace(config=config, slow=False, mesh=one_device_mesh(), flops_per_example=1.0)
    goodput = Goodput(Clock(0.0), tmp_path / "none.json", None)
    with MetricsWriter(tmp_path) as writer, Display(2, quiet=True) as display:
        log = StepLog(run, writer, display, goodput=goodput, peak_flops=None, record=None)
        for step, tokens in enumerate((4.0, 0.0), start=1):
            figures = {"loss": 0.0, "gradient_norm": 0.0, "tokens": tokens, "skipped": 0.0, "skipped_in_a_row": 0.0}
            log.add(step, {name: jnp.float32(value) for name, value in figures.items()}, rows=1)
        log.flush()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"]: line["loss"] for line in lines if line["kind"] == "train"} == {1: 0.0, 2: None}
