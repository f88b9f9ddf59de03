# SPDX-License-Identifier: Apache-2.0
"""Who is to blame where a run stands still or is slow, judged by what each process said last of itself.

There are neither clocks nor sockets here: signs go in, a name comes out.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

SILENT_SECONDS = 5.0  # older than the newest: signs come every second
SLOW_SECONDS, SLOW_STEPS = 10.0, 10.0  # that the others wait, both, before it is told
SLOW_START_SECONDS = 60.0  # the same before the first step, where caches make hosts differ
WINDOW_SECONDS, WINDOW_STEPS, WINDOWS = 10.0, 3, 2  # to be slow in, before it is told
EXCESS = 0.25  # of the time, by which the others wait longer than who is slow
OWN_WAIT = 0.2  # of the time: who waits longer for its devices hides behind their work whatever else it does
NAMED = 4
WORDS = {"start_up": "start-up", "wait": "step"}  # for phases, in messages
BEFORE_STEPS = ("start_up", "compile")
REPEATED = ("data", "step")  # in each step, so that it is known how long they usually take
DEVICES = (("step", "wait"), ("wait",))  # phases that wait for devices: giving them work may do so too, as on a CPU


@dataclasses.dataclass(frozen=True)
class Sign:
    """What a process says of itself every second.

    Attributes:
      phase, step, number, seconds: as in training/clock.py, `seconds` with the present phase's.
      phase_seconds: in this phase, when it was said.
      age: seconds since then.
      doing: what takes long in this phase and gets on, in words; "": nothing that is known to.
      idle_seconds: since the phase began or last got on, when it was said; None: since it began.
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
        """Seconds by now in which this phase did not get on."""
        return (self.phase_seconds if self.idle_seconds is None else self.idle_seconds) + self.age

    @property
    def name(self) -> str:
        """Its number and machine."""
        return f"{self.process} ({self.host})"

    @property
    def word(self) -> str:
        """Its phase, in messages."""
        return WORDS.get(self.phase, self.phase)

    @property
    def where(self) -> str:
        """What it does, in words."""
        return self.word if self.phase in BEFORE_STEPS else f"{self.word} of step {self.step}"


class Blame(NamedTuple):
    """Who holds up the run.

    Attributes:
      why: "silent", "behind", "together" (all are equally far) or "slow" (again and again).
      processes: their numbers.
      first: sign of the first of them, in the phase that it is blamed for.
      seconds: that they have been silent, in this phase, or slow.
      waited: seconds for which nobody got further.
      text: all of it in words.
      idle: seconds in which none of the processes got on.
    """

    why: str
    processes: tuple[int, ...]
    first: Sign
    seconds: float
    waited: float
    text: str
    idle: float = 0.0

    def figures(self) -> dict:
        """Return what is worth keeping in metrics.jsonl."""
        of_first = {"host": self.first.host, "phase": self.first.word, "step": self.first.step}
        return {"why": self.why, "processes": self.processes, **of_first, "seconds": self.seconds}


def to_blame(signs: Sequence[Sign]) -> Blame:
    """Return who is silent, else who is furthest behind; of at least one process."""
    newest = min(sign.age for sign in signs)  # the hub itself may have been away, which makes all of them old
    silent = [sign for sign in signs if sign.age - newest > SILENT_SECONDS]
    if silent:
        silent.sort(key=lambda sign: sign.number)
        return _found("silent", silent, signs, min(sign.age for sign in silent))
    last = min(sign.number for sign in signs)
    behind = [sign for sign in signs if sign.number == last]
    behind = [sign for sign in behind if not sign.waits] or behind
    why = "behind" if len(behind) < len(signs) else "together"
    return _found(why, behind, signs, min(sign.stay for sign in behind))


def slow(before: Sequence[Sign], now: Sequence[Sign]) -> Blame | None:
    """Return who hardly waited between two looks, while the others waited for it; None where nobody did.

    `before` and `now` are signs of the same processes, in the same order, some steps apart.
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
    """Looks every second; names who holds up the others once, and again when that has lasted twice as long."""

    def __init__(self):
        self.before: Sequence[Sign] = []  # the signs with which the window began
        self.step_seconds = 0.0  # usual
        self.told: dict[str, tuple] = {}
        self.slow: tuple[int, int, float] = (-1, 0, 0.0)  # process, for how many windows, for how many seconds

    def look(self, signs: Sequence[Sign]) -> list[Blame]:
        """Return what is to be told now, of the signs of all processes in their order."""
        return [found for found in (self._stuck(signs), self._steady(signs)) if found]

    def _stuck(self, signs: Sequence[Sign]) -> Blame | None:
        found = to_blame(signs)
        usual = found.first.word in REPEATED and self.step_seconds > 0
        early = found.why != "silent" and found.first.phase in BEFORE_STEPS
        patience = SLOW_START_SECONDS if early else SLOW_SECONDS
        if found.waited <= max(patience, SLOW_STEPS * self.step_seconds) or (found.why == "together" and not usual):
            return None
        if not self._is_new("stuck", found.first.number, found.waited):
            return None
        waits = "" if found.why == "together" else f"; the others wait for {_text(found.waited)} s"
        return found._replace(text=found.text + waits)

    def _steady(self, signs: Sequence[Sign]) -> Blame | None:
        if [sign.process for sign in self.before] != [sign.process for sign in signs]:
            self.before = [] if any(sign.phase in BEFORE_STEPS for sign in signs) else signs
            return None
        elapsed = min(sum(_difference(*pair).values()) for pair in zip(self.before, signs, strict=True))
        steps = min(sign.step - earlier.step for earlier, sign in zip(self.before, signs, strict=True))
        if elapsed < WINDOW_SECONDS or steps < WINDOW_STEPS:
            return None
        found, first = slow(self.before, signs), _difference(self.before[0], signs[0])
        self.step_seconds = sum(first[phase] for phase in ("data", "step", "wait")) / steps
        self.before = signs
        return self._again(found, elapsed)

    def _again(self, found: Blame | None, elapsed: float) -> Blame | None:
        """Count the windows in which the same process is slow."""
        process = found.processes[0] if found else -1
        if process != self.slow[0]:
            self.slow = (process, 0, 0.0)
            self.told.pop("slow", None)
        self.slow = (process, self.slow[1] + 1, self.slow[2] + elapsed)
        if found is None or self.slow[1] < WINDOWS or not self._is_new("slow", process, self.slow[2]):
            return None
        return found._replace(seconds=self.slow[2])

    def _is_new(self, kind: str, incident: int, seconds: float) -> bool:
        last, told = self.told.get(kind, (None, 0.0))
        if incident == last and seconds < 2 * told:
            return False
        self.told[kind] = (incident, seconds)
        return True


def _found(why: str, whose: Sequence[Sign], signs: Sequence[Sign], seconds: float) -> Blame:
    first, several = whose[0], len(whose) > 1
    others = [sign.stay for sign in signs if sign not in whose]
    more = f" and {len(whose) - NAMED} more" if len(whose) > NAMED else ""
    names = f"process{'es' * several} {', '.join(sign.name for sign in whose[:NAMED])}{more}"
    if why == "silent":
        verb, was = ("give", "the first was") if several else ("gives", "it was")
        text = f"{names} {verb} no sign of life for {_text(seconds)} s; {was} in {first.where}"
    else:
        text = f"{names} {'are' if several else 'is'} in {first.where} for {_text(seconds)} s"
        text += f" ({first.doing})" if first.doing else ""
    idle = min(sign.idle for sign in whose)
    return Blame(why, tuple(sign.process for sign in whose), first, seconds, min([seconds, *others]), text, idle)


def _found_slow(sign: Sign, phase: str, spent: Mapping[str, float], elapsed: float, steps: int, excess: float) -> Blame:
    sign = dataclasses.replace(sign, phase=phase)
    a_step = f"{_text(spent[phase] / steps)} of {_text(elapsed / steps)} s a step in {sign.word}"
    text = f"process {sign.name} is slow: it spends {a_step}; the others wait for it {excess:.0%} of the time"
    return Blame("slow", (sign.process,), sign, elapsed, excess * elapsed, text)


def _difference(before: Sign, now: Sign) -> dict[str, float]:
    return {phase: now.seconds[phase] - before.seconds.get(phase, 0.0) for phase in now.seconds}


def _of_others(values: Sequence[float], index: int) -> float:
    return statistics.median([*values[:index], *values[index + 1 :]])


def _excess(spent: Sequence[Mapping[str, float]], phase: str, index: int) -> float:
    return spent[index][phase] - _of_others([phases[phase] for phases in spent], index)


def _text(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"
