# SPDX-License-Identifier: Apache-2.0
"""Find the process that blocks or slows a run, from the last heartbeat of each process.

This file reads no clock and no socket: heartbeats go in, a name comes out.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from reporting.clock import OF_STEPS
from reporting.display import listed

SILENT_SECONDS = 5.0  # age over the newest heartbeat; heartbeats come every second
SLOW_SECONDS, SLOW_STEPS = 10.0, 10.0  # the others wait this long, by both measures, before a report
SLOW_START_SECONDS = 60.0  # the same before the first step; caches make hosts differ there
WINDOW_SECONDS, WINDOW_STEPS, WINDOWS = 10.0, 3, 2  # WINDOWS: a process is slow in this many before a report
EXCESS = 0.25  # fraction of the time that the others wait more than the slow process
OWN_WAIT = 0.2  # fraction of the time; a process that waits longer for its devices is limited by them, not by itself
NAMED = 4
WORDS = {"start_up": "start-up", "wait": "step"}  # for phases, in messages
BEFORE_STEPS = ("start_up", "compile")
REPEATED = ("data", "step")  # phases of each step, whose usual duration is known
DEVICES = (("step", "wait"), ("wait",))  # phases that wait for devices; on a CPU the dispatch of a step waits too


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """The status that a process sends every second.

    Attributes:
      phase, step, number, seconds: as in reporting/clock.py; `seconds` includes the present phase.
      phase_seconds: time in this phase when it was sent.
      age: seconds since it was sent.
      doing: description of slow work that makes progress in this phase; "": none is known.
      idle_seconds: time without progress in this phase when it was sent; None: since the phase began.
      waits: whether it waits for values of the others.
    """

    process: int
    host: str
    phase: str
    step: int
    number: int
    phase_seconds: float
    seconds: Mapping[str, float]
    age: float = 0.0
    waits: bool = False
    doing: str = ""
    idle_seconds: float | None = None

    @property
    def stay(self) -> float:
        """Seconds in this phase by now."""
        return self.phase_seconds + self.age

    @property
    def idle(self) -> float:
        """Seconds without progress in this phase by now."""
        return (self.phase_seconds if self.idle_seconds is None else self.idle_seconds) + self.age

    @property
    def name(self) -> str:
        """The number and machine of the process."""
        return f"{self.process} ({self.host})"

    @property
    def word(self) -> str:
        """The word for the phase in messages."""
        return WORDS.get(self.phase, self.phase)

    @property
    def where(self) -> str:
        """The phase and step in words."""
        return self.word if self.phase in BEFORE_STEPS else f"{self.word} of step {self.step}"


class Blame(NamedTuple):
    """The processes that block or slow the run.

    Attributes:
      why: "silent", "behind", "together" (all are at the same point) or "slow" (repeatedly).
      processes: their numbers.
      first: heartbeat of the first of them, in the phase that is to blame.
      seconds: time that they were silent, in this phase, or slow.
      waited: seconds in which no process moved on; of a slow process, those that the others waited longer than it.
      text: a description in words.
      idle: seconds in which none of these processes made progress.
    """

    why: str
    processes: tuple[int, ...]
    first: Heartbeat
    seconds: float
    waited: float
    text: str
    idle: float = 0.0

    def figures(self) -> dict:
        """Return the values for metrics.jsonl."""
        of_first = {"host": self.first.host, "phase": self.first.word, "step": self.first.step}
        return {"why": self.why, "processes": self.processes, **of_first, "seconds": self.seconds}


def to_blame(beats: Sequence[Heartbeat]) -> Blame:
    """Return the silent processes, or else those that are furthest behind; needs at least one heartbeat."""
    newest = min(beat.age for beat in beats)  # if the hub itself was frozen, all heartbeats are old
    silent = [beat for beat in beats if beat.age - newest > SILENT_SECONDS]
    if silent:
        silent.sort(key=lambda beat: beat.number)
        return _found("silent", silent, beats, min(beat.age for beat in silent))
    last = min(beat.number for beat in beats)
    behind = [beat for beat in beats if beat.number == last]
    behind = [beat for beat in behind if not beat.waits] or behind
    why = "behind" if len(behind) < len(beats) else "together"
    return _found(why, behind, beats, min(beat.stay for beat in behind))


def slow(before: Sequence[Heartbeat], now: Sequence[Heartbeat]) -> Blame | None:
    """Return the process that hardly waited between two looks, while the others waited for it; or None.

    `before` and `now` are heartbeats of the same processes, in the same order, some steps apart.
    """
    if len(now) == 1:
        return None
    spent = [_difference(*pair) for pair in zip(before, now, strict=True)]
    elapsed = [max(sum(phases.values()), 1e-9) for phases in spent]
    for devices in DEVICES:
        shares = [sum(phases[d] for d in devices) / s for phases, s in zip(spent, elapsed, strict=True)]
        least = shares.index(min(shares))
        excess = _of_others(shares, least) - shares[least]
        if excess > EXCESS and spent[least]["wait"] / elapsed[least] < OWN_WAIT:
            own = {phase: _excess(spent, phase, least) for phase in spent[least] if phase not in devices}
            steps = now[least].step - before[least].step
            return _found_slow(now[least], max(own, key=own.get), spent[least], elapsed[least], steps, excess)
    return None


class Judge:
    """Look every second; report a process that blocks the others once, and again after twice the time."""

    def __init__(self):
        self.before: Sequence[Heartbeat] = []  # the heartbeats at the start of the window
        self.step_seconds = 0.0  # usual
        self.reported: dict[str, tuple] = {}
        self.slow: tuple[int, int, float] = (-1, 0, 0.0)  # process, for how many windows, for how many seconds

    def look(self, beats: Sequence[Heartbeat]) -> list[Blame]:
        """Return what to report now, from the heartbeats of all processes in their order."""
        return [found for found in (self._stuck(beats), self._steady(beats)) if found]

    def _stuck(self, beats: Sequence[Heartbeat]) -> Blame | None:
        found = to_blame(beats)
        usual = found.first.word in REPEATED and self.step_seconds > 0
        early = found.why != "silent" and found.first.phase in BEFORE_STEPS
        patience = SLOW_START_SECONDS if early else SLOW_SECONDS
        if found.waited <= max(patience, SLOW_STEPS * self.step_seconds) or (found.why == "together" and not usual):
            return None
        if not self._is_new("stuck", found.first.number, found.waited):
            return None
        waits = "" if found.why == "together" else f"; the others have waited {_text(found.waited)} s"
        return found._replace(text=found.text + waits)

    def _steady(self, beats: Sequence[Heartbeat]) -> Blame | None:
        if [beat.process for beat in self.before] != [beat.process for beat in beats]:
            self.before = [] if any(beat.phase in BEFORE_STEPS for beat in beats) else beats
            return None
        elapsed = min(sum(_difference(*pair).values()) for pair in zip(self.before, beats, strict=True))
        steps = min(beat.step - earlier.step for earlier, beat in zip(self.before, beats, strict=True))
        if elapsed < WINDOW_SECONDS or steps < WINDOW_STEPS:
            return None
        found, first = slow(self.before, beats), _difference(self.before[0], beats[0])
        self.step_seconds = sum(first[phase] for phase in OF_STEPS) / steps
        self.before = beats
        return self._again(found, elapsed)

    def _again(self, found: Blame | None, elapsed: float) -> Blame | None:
        """Count the windows in which the same process is slow; return it if it is to be reported."""
        process = found.processes[0] if found else -1
        if process != self.slow[0]:
            self.slow = (process, 0, 0.0)
            self.reported.pop("slow", None)
        self.slow = (process, self.slow[1] + 1, self.slow[2] + elapsed)
        if found is None or self.slow[1] < WINDOWS or not self._is_new("slow", process, self.slow[2]):
            return None
        return found._replace(seconds=self.slow[2])

    def _is_new(self, kind: str, incident: int, seconds: float) -> bool:
        last, reported = self.reported.get(kind, (None, 0.0))
        if incident == last and seconds < 2 * reported:
            return False
        self.reported[kind] = (incident, seconds)
        return True


def _found(why: str, whose: Sequence[Heartbeat], beats: Sequence[Heartbeat], seconds: float) -> Blame:
    first, several = whose[0], len(whose) > 1
    others = [beat.stay for beat in beats if beat not in whose]
    names = f"process{'es' * several} {listed([beat.name for beat in whose], NAMED)}"
    if why == "silent":
        verb, was = ("have", "the first was") if several else ("has", "it was")
        text = f"{names} {verb} sent no heartbeat for {_text(seconds)} s; {was} in {first.where}"
    else:
        text = f"{names} {'have' if several else 'has'} been in {first.where} for {_text(seconds)} s"
        text += f" ({first.doing})" if first.doing else ""
    idle = min(beat.idle for beat in whose)
    return Blame(why, tuple(beat.process for beat in whose), first, seconds, min([seconds, *others]), text, idle)


def _found_slow(
    beat: Heartbeat, phase: str, spent: Mapping[str, float], elapsed: float, steps: int, excess: float
) -> Blame:
    beat = dataclasses.replace(beat, phase=phase)
    a_step = f"{_text(spent[phase] / steps)} of {_text(elapsed / steps)} s per step in {beat.word}"
    text = f"process {beat.name} is slow: it spends {a_step}; the others wait {excess:.0%} of the time for it"
    return Blame("slow", (beat.process,), beat, elapsed, excess * elapsed, text)


def _difference(before: Heartbeat, now: Heartbeat) -> dict[str, float]:
    return {phase: now.seconds[phase] - before.seconds.get(phase, 0.0) for phase in now.seconds}


def _of_others(values: Sequence[float], index: int) -> float:
    return statistics.median([*values[:index], *values[index + 1 :]])


def _excess(spent: Sequence[Mapping[str, float]], phase: str, index: int) -> float:
    return spent[index][phase] - _of_others([phases[phase] for phases in spent], index)


def _text(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"
