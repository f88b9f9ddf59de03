# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints a roll back sets aside: those with steps that a callback regrets, and one that only diverges."""

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


def set_suspect_aside(checkpoints: Checkpoints, trouble: Diverged, step: int) -> None:
    """Set a checkpoint aside after which no gradient was finite, on other batches too; NonFinite if it is the only one.

    Without it the run would begin at step 0 again, and not with the weights of an import.
    """
    if checkpoints.steps() == [step]:
        raise NonFinite(
            f"{trouble}; no step after checkpoint {step} had a finite gradient, on other batches neither, and there is "
            "no other checkpoint; check the weights that the run began with, or train in a new --workdir"
        )
    checkpoints.set_aside(step, "is not used: no step after it had a finite gradient")


def example_after(regret: Diverged, first: int, restored: int, begun: int) -> int:
    """Return the first example to leave out: `first`, that of `first_step`, or the restored one if it is not known.

    Args:
      restored: number of examples at the restored checkpoint.
      begun: step at which this process, or the present attempt, began; earlier steps may have had other batches.
    """
    return restored if regret.applied and regret.first_step <= begun else max(first, restored)
