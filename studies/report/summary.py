# SPDX-License-Identifier: Apache-2.0
"""How a study stands: queued, running, done, failed and cancelled trials by group, chip-hours, cost and time left."""

import collections
import heapq
import statistics

from optuna.trial import FrozenTrial, TrialState

from reporting import display
from reporting.display import aligned, counted, duration
from studies.cost.budget import cost_of, taken_by
from studies.suites import Member, Study
from studies.trials import RAN_BEFORE, RAN_SECONDS, standing, title

HEADING = ("group", "queued", "running", "done", "failed", "cancelled", "not queued", "chip-hours", "cost")


def lines(
    study: Study, members: list[Member], trials: dict[str, FrozenTrial], running: set[int], price: float | None = None
) -> list[str]:
    """Return the table by group, a line for each failure, and the time left.

    A trial that several groups share counts in each of them, and once in the sums.

    Args:
      trials: the last trial of each configuration by its digest.
      running: numbers of the trials that a worker holds.
      price: dollars per chip-hour, which may be 0; None: that with which each trial recorded its cost.
    """
    rows, wanted = [HEADING], [member for member in members if not member.refusal]
    for group in dict.fromkeys(member.group for member in wanted):
        digests = dict.fromkeys(member.digest for member in wanted if member.group == group)
        rows.append((group, *_figures([trials.get(digest) for digest in digests], running, price)))
    found = [trials.get(digest) for digest in dict.fromkeys(member.digest for member in wanted)]
    rows.append(("all", *_figures(found, running, price)))
    failed = [trial for trial in found if trial and standing(trial) == "failed"]
    reasons = [f"failed: {title(trial)}: {trial.user_attrs['reason']}" for trial in failed]
    return [f"study {study.name}", *aligned(rows), *reasons, *_time_left(found, running)]


def _figures(trials: list[FrozenTrial | None], running: set[int], price: float | None) -> tuple[str, ...]:
    """Return the cells of a row after its name; None is a configuration without a trial."""
    found = [trial for trial in trials if trial]
    count = collections.Counter(map(standing, found))
    alive = sum(standing(trial) == "left" and trial.number in running for trial in found)
    hours, cost = sum(map(taken_by, found)), cost_of(found, price)
    ended = (count["done"], count["failed"], count["cancelled"])
    counts = (count["left"] - alive, alive, *ended, len(trials) - len(found))
    return (*map(str, counts), f"{hours:.2f}", "not known" if cost is None else f"${cost:,.2f}")


def _time_left(found: list[FrozenTrial | None], running: set[int]) -> list[str]:
    """Return the line about the time left; the trials that are done say how long one takes."""
    left = [trial for trial in found if trial is None or not trial.state.is_finished()]
    done = [trial for trial in found if trial and trial.state == TrialState.COMPLETE]
    if not left:
        return ["every trial has ended"]
    still_left = display.left(len(left), "trial")
    if not done:
        return [f"{still_left}; how long one takes is not known before one is done"]
    mean = statistics.fmean(trial.user_attrs.get("wall_seconds", 0.0) for trial in done)
    alive = [trial for trial in left if trial is not None and trial.number in running]
    workers = max(1, len(alive))
    seconds = _until_idle([_still(trial, mean) for trial in alive], len(left) - len(alive), mean)
    if not seconds:
        return [f"{still_left}; what runs has already taken longer than the {duration(mean)} of a trial"]
    return [f"{still_left}, about {duration(seconds)} with {counted(workers, 'worker')}"]


def _still(trial: FrozenTrial, mean: float) -> float:
    """Return the seconds that a running trial still takes if its total is the mean."""
    ran = trial.user_attrs.get(RAN_BEFORE, 0.0) + trial.user_attrs.get(RAN_SECONDS, 0.0)
    return max(0.0, mean - ran)


def _until_idle(running: list[float], waiting: int, mean: float) -> float:
    """Return the seconds until the last worker is done; a free worker takes the next whole trial."""
    free = running or [0.0]
    heapq.heapify(free)
    for _ in range(waiting):
        heapq.heapreplace(free, free[0] + mean)
    return max(free)
