# SPDX-License-Identifier: Apache-2.0
"""Data that a run needs and cannot read any more: all processes stop before it is needed, save, and say why."""

from parallelism import processes
from parallelism.hub import BOUNDARIES_TO_STOP, RunError
from training.interruption import Interrupted, Interruption


class DataGone(RunError):
    """Data cannot be read any more; the message says what, why, and where the run was saved."""


class LostData:
    """Why data cannot be read any more, in this process or another.

    A process that cannot read its part of a batch must not leave the others waiting in a step for it. So in a group
    each reads `ahead` batches further than it trains: then the loss is known while there are batches up to where all
    stop.

    Attributes:
        reason: "" where all can be read.
        ahead: batches that are to be read before one is used.
    """

    def __init__(self, signals: Interruption):
        self.reason, self.signals = "", signals
        self.ahead = BOUNDARIES_TO_STOP if processes.count() > 1 else 0

    def lose(self, error: Exception) -> None:
        """Take note that data cannot be read any more, from any thread, and ask all processes to stop."""
        if not self.reason:
            self.reason = str(error)
            processes.ask_to_stop(hold=True)
            self.signals.ask(self.reason)

    def agree(self) -> str:
        """Return why data cannot be read any more in some process, "" where it can in all; all have to ask together."""
        self.reason = next(filter(None, processes.gather("lost data", self.reason)), "")
        return self.reason

    def stopped(self, step: int) -> Exception:
        """Return what ends the run after a step at which all stop, its state being saved."""
        if not self.agree():
            return Interrupted(step)
        return DataGone(f"{self.reason}; " + (f"saved at step {step}" if step else "nothing was trained"))
