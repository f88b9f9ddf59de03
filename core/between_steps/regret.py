# SPDX-License-Identifier: Apache-2.0
"""A roll back that a callback asked for: the checkpoints that have the steps which it regrets are not used again."""

from checkpointing.checkpoints import Checkpoints
from reporting.step_log import Diverged, NonFinite


def set_aside(checkpoints: Checkpoints, regret: Diverged) -> None:
    """Set the checkpoints from `first_step` on aside; NonFinite if none is older, or if one cannot be set aside."""
    steps = checkpoints.steps()
    newer = [step for step in steps if step >= regret.first_step]
    if newer and newer == steps:
        raise NonFinite(
            f"{regret}; no checkpoint is from before step {regret.first_step}, so that all have these steps: "
            "begin again in a new --workdir, and set --config.checkpoint.keep to keep more of them"
        )
    for step in newer:
        checkpoints.set_aside(step, f"is not used: {regret}", event="regretted")
    if left := set(newer) & set(checkpoints.steps()):
        raise NonFinite(f"{regret}; checkpoint {min(left)} has these steps and cannot be set aside; delete it")


def example_after(regret: Diverged, first: int, restored: int, begun: int) -> int:
    """Return the first example to leave out: `first`, that of `first_step`, or the restored one if it is not known.

    Args:
      restored: number of examples at the restored checkpoint.
      begun: step at which this process, or the present attempt, began; earlier steps may have had other batches.
    """
    return restored if regret.applied and regret.first_step <= begun else max(first, restored)
