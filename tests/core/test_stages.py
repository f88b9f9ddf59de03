# SPDX-License-Identifier: Apache-2.0
"""The stages of a run, and the shape at which it ends."""

import types

from configs import base
from core.between_steps.stages import Stages


def test_a_finished_run_is_evaluated_with_the_complete_cycles():
    """Its readers have them, also if the cycles grow up to the last step."""
    config = base.get_config()
    config.train.steps = 100
    config.model.update(high_cycles=3, low_cycles=4)
    config.supervision.update(first_high_cycles=1, first_low_cycles=1, growth_fraction=1.0)
    stages = Stages(config, None)
    last = stages.shape(99)
    assert last.cycles == (2, 3) and stages.complete(last) == last._replace(cycles=(3, 4))
    config.supervision.update(first_high_cycles=0, first_low_cycles=0)
    assert stages.complete(stages.shape(99)) == stages.shape(99), "nothing else is compiled"


def test_a_ramp_grows_after_the_last_step_too():
    """More steps may follow in a resumed run, which begins with the batch that the record says."""
    config = base.get_config()
    config.train.update(steps=8, global_batch=16, gradient_accumulation=1)
    config.batch.update(ramp="steps", first=4, increase_step=4, increase_factor=2.0)
    stages = Stages(config, {"step": 4, "examples": 16, "increases": 1})
    stages.begin(4)
    job = types.SimpleNamespace(log=types.SimpleNamespace(flush=lambda: None, event=None))
    assert stages.on_step(job, None, 8) is None and stages.increases == 2
