# SPDX-License-Identifier: Apache-2.0
"""Goodput: accounts for every second of a run since it first started, across restarts."""

import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, NotRequired

import pydantic

from files.json_reader import JsonError, Object, read_json
from reporting.clock import Clock
from reporting.display import duration
from reporting.metrics import Line

MOST_SECONDS = 1e11  # some thousand years
Seconds = Annotated[float, pydantic.Field(ge=-MOST_SECONDS, le=MOST_SECONDS)]

PARTS = {  # parts of the wall-clock time: the words of the summary, and the phases that count to it
    "start_up": ("starting", ("start_up",)),
    "compile": ("compiling", ("compile",)),
    "training": ("training", ("rollout", "step", "wait")),
    "data": ("waiting for data", ("data",)),
    "evaluation": ("evaluating", ("evaluation",)),
    "checkpoint": ("saving", ("save",)),
    "profile": ("profiling", ("profile",)),
    "lost": ("lost to restarts", ()),  # training, and waits for data, that are done again
    "idle": ("not running", ()),  # between two processes
}


class Account(Object):
    """The account that a process saves for the next.

    Attributes:
      began, time: start of the run, and now, as Unix seconds that do not jump within a process.
      clock: the wall clock now, which may have been set since the process began; older runs have none.
      parts: seconds by part.
    """

    began: Seconds
    time: Seconds
    clock: NotRequired[Seconds]
    parts: dict[str, Seconds]


class SignOfLife(Object):
    """The field that is read here from a file of cluster/watch.py."""

    seconds: Account


class Goodput:
    """The seconds of a run by `PARTS`; they sum to its wall-clock time.

    Within a process, time is measured by a monotonic clock. If the wall clock was set back between two processes, the
    later one is taken to begin at the last time of the earlier one. The wall clock may be set during a process.
    """

    def __init__(self, clock: Clock, sign_of_life: pathlib.Path, saved: dict | None):
        """Continue the account of earlier processes.

        Args:
          sign_of_life: JSON file whose `seconds` is the last `record` of the previous process.
          saved: the `record` in the checkpoint that the run resumes from; None for a new run, also of imported weights.
        """
        began = time.time() - _elapsed(clock)
        nothing: Account = {"began": began, "time": began, "parts": {}}
        accounts = [account for account in (saved, last_account(sign_of_life)) if account]
        last = max(accounts, key=lambda account: account["time"], default=nothing)
        self.clock, self.began = clock, min(last["began"], last["time"])
        self.process_began = last["time"] + max(0.0, began - last.get("clock", last["time"]))
        self.before = {part: max(0.0, last["parts"].get(part, 0.0)) for part in PARTS}
        self.lost_since((saved or nothing)["parts"])
        self.before["idle"] += self.process_began - last["time"]

    def lost_since(self, saved: Mapping[str, float]) -> None:
        """Count the time of the steps after an account's `parts` as lost: these steps are repeated."""
        for part in ("training", "data"):
            repeated = max(0.0, self.parts()[part] - max(0.0, saved.get(part, 0.0)))
            self.before[part] -= repeated
            self.before["lost"] += repeated

    def parts(self) -> dict[str, float]:
        """Return {part: seconds} of the run up to now."""
        phases = self.clock.read()
        return {part: self.before[part] + sum(phases[phase] for phase in of) for part, (_, of) in PARTS.items()}

    def record(self) -> Account:
        """Return the account for a later process, as JSON values."""
        return {"began": self.began, "time": self._now(), "clock": time.time(), "parts": self.parts()}

    def _now(self) -> float:
        return self.process_began + _elapsed(self.clock)

    def wall_seconds(self) -> float:
        """Return the wall-clock seconds since the run first began."""
        return self._now() - self.began

    def fraction(self) -> float:
        """Return the fraction of the wall-clock time that was spent on training that is not lost."""
        return min(1.0, self.parts()["training"] / max(self.wall_seconds(), 1e-9))

    def line(self) -> str:
        """Return the account in words."""
        parts, wall = self.parts(), self.wall_seconds()
        rest = ", ".join(f"{PARTS[part][0]} {duration(seconds)}" for part, seconds in parts.items() if seconds >= 0.05)
        return f"goodput: {self.fraction():.1%} of {duration(wall)} ({rest})"


def _elapsed(clock: Clock) -> float:
    """Return the seconds since this process began."""
    return sum(clock.read().values())


def last_account(sign_of_life: pathlib.Path) -> Account | None:
    """Return the account in a file of workers/; None if it is missing or damaged."""
    try:
        return read_json(sign_of_life, SignOfLife)["seconds"]
    except (OSError, JsonError):
        return None


def newest_parts(account: Account | None, lines: Sequence[Line]) -> dict[str, float]:
    """Return the seconds of a run by part, from its account or its last event `goodput`; {} if it has neither.

    The event is taken if it is later: another host may have continued the run, or the folder has no heartbeats.

    Args:
      account: from the heartbeat of process 0; None if there is none.
      lines: of metrics.jsonl, in order.
    """
    event = next((line for line in reversed(lines) if line.get("event") == "goodput" and "time" in line), None)
    if event is None or (account and account["time"] >= event["time"]):
        return account["parts"] if account else {}
    seconds = event.get("seconds")
    parts = seconds.items() if isinstance(seconds, dict) else ()
    return {part: number for part, number in parts if isinstance(number, int | float) and abs(number) <= MOST_SECONDS}
