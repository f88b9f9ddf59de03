# SPDX-License-Identifier: Apache-2.0
"""The stages of a run, and the shape at which it ends."""

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
