# SPDX-License-Identifier: Apache-2.0
"""TPUProfiler: profiling/loop.py by the guide's names."""

from collections.abc import Mapping

from migration.vishwamai import keys
from profiling.loop import LoopProfile
from profiling.windows import Window


class TPUProfiler(LoopProfile):
    """Call `start_step` and `end_step` around each step; the trainer does so itself."""

    def __init__(self, config: Mapping, traced: tuple[int, int] = (10, 14)):
        """`traced`: the first and the last step of a trainer's run that are traced."""
        super().__init__(keys.recipe(config), Window(*traced))

    get_metrics_summary = LoopProfile.summary
    add_detailed_metrics = LoopProfile.add_details
    get_actionable_recommendations = LoopProfile.advice
