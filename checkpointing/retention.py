# SPDX-License-Identifier: Apache-2.0
"""The retention policy of checkpoints."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Retention:
    """Keep the newest `newest`, multiples of `every` steps (0: none for that), and the `best` by held-out loss."""

    newest: int
    every: int = 0
    best: int = 0

    @classmethod
    def of_config(cls, checkpoint) -> "Retention":
        return cls(checkpoint.keep, checkpoint.keep_every, checkpoint.keep_best)

    def reasons(self, steps: list[int], losses: dict[int, float]) -> dict[int, str]:
        """Return {step: reason} of the checkpoints to keep; `losses` has held-out losses of some of the steps."""
        best = sorted((step for step in steps if step in losses), key=lambda step: (losses[step], step))[: self.best]
        kept = {step: f"best held-out loss, {losses[step]:.4f}" for step in best}
        kept |= {step: f"every {self.every} steps" for step in steps if self.every and step % self.every == 0}
        return kept | dict.fromkeys(sorted(steps)[-self.newest :], "newest")
