# SPDX-License-Identifier: Apache-2.0
"""Accounts for every second of a run since it first began, across restarts: how much of it has trained?"""

import pathlib
import time
from typing import Annotated

import pydantic

from files.json_reader import JsonError, Object, read_json
from training.clock import Clock
from training.display import duration

Seconds = Annotated[float, pydantic.Field(ge=-1e11, le=1e11)]  # some thousand years

PARTS = {  # of the wall-clock time: in the words of the summary, and the phases that come to it
    "start_up": ("starting", ("start_up",)),
    "compile": ("compiling", ("compile",)),
    "training": ("training", ("step", "wait")),
    "data": ("waiting for data", ("data",)),
    "evaluation": ("evaluating", ("evaluation",)),
    "checkpoint": ("saving", ("save",)),
    "lost": ("lost to restarts", ()),  # training that is done again
    "idle": ("not running", ()),  # between two processes
}


class Account(Object):
    """What a process leaves for the next: when the run began, the time now (Unix seconds), and the seconds by part."""

    began: Seconds
    time: Seconds
    parts: dict[str, Seconds]


class SignOfLife(Object):
    """What is read here of a file of training/watch.py."""

    seconds: Account


class Goodput:
    """The seconds of a run by `PARTS`; they sum to its wall-clock time.

    Within a process the clock that only goes forward counts. Where the wall clock was set back between two processes,
    the later one began when the earlier one was last seen.
    """

    def __init__(self, clock: Clock, sign_of_life: pathlib.Path, saved: dict | None):
        """Take up the account of the processes before.

        Args:
          sign_of_life: JSON file whose `seconds` is what `record` gave last to the process before.
          saved: what `record` gave at the checkpoint that the run goes on from; None: it begins.
        """
        began = time.time() - _elapsed(clock)
        nothing: Account = {"began": began, "time": began, "parts": {}}
        accounts = [account for account in (saved, _last(sign_of_life)) if account]
        last = max(accounts, key=lambda account: account["time"], default=nothing)
        self.clock, self.began = clock, min(last["began"], last["time"])
        self.process_began = max(began, last["time"])
        self.before = {part: max(0.0, last["parts"].get(part, 0.0)) for part in PARTS}
        self.lost_since((saved or nothing)["parts"].get("training", 0.0))
        self.before["idle"] += self.process_began - last["time"]

    def lost_since(self, saved: float) -> None:
        """Book as lost what was trained since so many seconds of training were `saved`: it is done again."""
        trained = max(0.0, self.parts()["training"] - max(0.0, saved))
        self.before["training"] -= trained
        self.before["lost"] += trained

    def parts(self) -> dict[str, float]:
        """Return {part: seconds} of the run up to now."""
        phases = self.clock.read()
        return {part: self.before[part] + sum(phases[phase] for phase in of) for part, (_, of) in PARTS.items()}

    def record(self) -> Account:
        """Return what a later process goes on from, as JSON can hold it."""
        return {"began": self.began, "time": self._now(), "parts": self.parts()}

    def _now(self) -> float:
        return self.process_began + _elapsed(self.clock)

    def wall_seconds(self) -> float:
        """Return the wall-clock seconds since the run first began."""
        return self._now() - self.began

    def fraction(self) -> float:
        """Return the part of the wall-clock time that trained what the run is now."""
        return min(1.0, self.parts()["training"] / max(self.wall_seconds(), 1e-9))

    def line(self) -> str:
        """Return the account in words."""
        parts, wall = self.parts(), self.wall_seconds()
        rest = ", ".join(f"{PARTS[part][0]} {duration(seconds)}" for part, seconds in parts.items() if seconds >= 0.05)
        return f"goodput: {self.fraction():.1%} of {duration(wall)} ({rest})"


def _elapsed(clock: Clock) -> float:
    """Return the seconds since this process began."""
    return sum(clock.read().values())


def _last(sign_of_life: pathlib.Path) -> Account | None:
    """Return the account in the file; None where there is none, or it is damaged."""
    try:
        return read_json(sign_of_life, SignOfLife)["seconds"]
    except (OSError, JsonError):
        return None
