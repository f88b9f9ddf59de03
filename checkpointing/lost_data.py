# SPDX-License-Identifier: Apache-2.0
"""Handle data that became unreadable: all processes stop before they need it, save, and report the reason."""

from cluster import processes
from cluster.hub import BOUNDARIES_TO_STOP, RunError
from cluster.interruption import Interrupted, Interruption


class DataGone(RunError):
    """Data became unreadable, or a reward is unusable; the message says why, and at which step the run was saved."""


class LostData:
    """The reason why data became unreadable, in this process or another.

    If one process cannot read its part of a batch, the others would wait for it in a step forever. So in a group each
    process reads `ahead` batches further than it trains. When a read fails, there are still enough batches up to the
    boundary at which all stop.

    Attributes:
        reason: "" if all data is readable.
        ahead: number of batches to read before the first is used.
    """

    def __init__(self, signals: Interruption):
        self.reason, self.signals = "", signals
        self.ahead = BOUNDARIES_TO_STOP if processes.count() > 1 else 0

    def record(self, error: Exception) -> None:
        """Record that data became unreadable, from any thread, and ask all processes to stop."""
        if not self.reason:
            self.reason = str(error)
            processes.ask_to_stop(hold=True)
            self.signals.ask(self.reason)

    def gather_reason(self) -> str:
        """Return the reason of any process, "" if there is none; all processes must call this together."""
        self.reason = next(filter(None, processes.gather("lost data", self.reason)), "")
        return self.reason

    def stop_error(self, step: int) -> Exception:
        """Return the exception that ends the run after a step at which all stop; the state is already saved."""
        if not self.gather_reason():
            return Interrupted(step)
        return DataGone(f"{self.reason}; " + (f"saved at step {step}" if step else "nothing was saved"))
