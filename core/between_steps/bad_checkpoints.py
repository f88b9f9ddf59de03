# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints a roll back sets aside: those with steps that a callback regrets, and one that always diverges."""

import dataclasses

from checkpointing.checkpoints import Checkpoints
from reporting.step_log import Diverged, NonFinite

DIVERGENCES, SPIKES = 2, 3  # in a row, after which a checkpoint is bad


def set_aside(checkpoints: Checkpoints, cause: Diverged) -> None:
    """Set the checkpoints from `first_step` on aside; NonFinite if none is older, or if one cannot be set aside."""
    steps = checkpoints.steps()
    newer = [step for step in steps if step >= cause.first_step]
    if newer and newer == steps:
        raise NonFinite(
            f"{cause}; no checkpoint is from before step {cause.first_step}, so all of them contain these steps: "
            "begin again in a new --workdir, and set --config.checkpoint.keep to keep more of them"
        )
    for step in newer:
        checkpoints.set_aside(step, f"is not used: {cause}", event="regretted")
    if left := set(newer) & set(checkpoints.steps()):
        raise NonFinite(f"{cause}; checkpoint {min(left)} has these steps and cannot be set aside; delete it")


@dataclasses.dataclass
class Suspicion:
    """Evidence against a checkpoint: consecutive attempts from it, on other batches, that accepted no update."""

    step: int | None = None
    count: int = 0

    def finds_bad(self, checkpoints: Checkpoints, trouble: Diverged, step: int) -> bool:
        """Count a roll back to checkpoint `step`, and set it aside if it is bad; return whether it was.

        Spikes are weaker evidence than what is not finite. Raises NonFinite for the only checkpoint: without it the run
        would begin at step 0 again, and not with the weights of an import.
        """
        if trouble.applied or trouble.first_step > step + 1:  # there was an accepted update
            return False
        self.count = self.count + 1 if self.step == step else 1
        self.step = step
        is_only = checkpoints.steps() == [step]
        if self.count < (SPIKES if trouble.was_finite else DIVERGENCES) or (trouble.was_finite and is_only):
            return False
        if is_only:
            raise NonFinite(
                f"{trouble}; no step after checkpoint {step} had a finite gradient, not on other batches either, and "
                "there is no other checkpoint; check the weights that the run began with, or train in a new --workdir"
            )
        checkpoints.set_aside(step, "is not used: no update after it was accepted, not on other batches either")
        return True


def example_after(cause: Diverged, first: int, restored: int, begun: int) -> int:
    """Return the first example to leave out: `first`, that of `first_step`, or the restored one if it is not known.

    Args:
      restored: number of examples at the restored checkpoint.
      begun: step at which this process, or the present attempt, began; earlier steps may have had other batches.
    """
    return restored if cause.applied and cause.first_step <= begun else max(first, restored)
