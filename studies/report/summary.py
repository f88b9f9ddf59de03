# SPDX-License-Identifier: Apache-2.0
"""How a study stands: queued, running, done, failed and cancelled trials by group, chip-hours, cost and time left."""

from collections.abc import Iterable

from optuna.trial import FrozenTrial, TrialState

from reporting import display
from reporting.display import aligned, duration
from studies.cost.budget import taken_by
from studies.suites import Member, Study
from studies.trials import has_failed, title

HEADING = ("group", "queued", "running", "done", "failed", "cancelled", "not queued", "chip-hours", "cost")


def lines(
    study: Study, members: list[Member], trials: dict[str, FrozenTrial], running: set[int], price: float | None = None
) -> list[str]:
    """Return the table by group, a line for each failure, and the time left.

    A trial that several groups share counts in each of them, and once in the sums.

    Args:
      trials: the last trial of each configuration by its digest.
      running: numbers of the trials that a worker holds.
      price: dollars per chip-hour, which may be 0; None: the cost that each trial recorded.
    """
    rows, wanted = [HEADING], [member for member in members if not member.refusal]
    for group in dict.fromkeys(member.group for member in wanted):
        digests = dict.fromkeys(member.digest for member in wanted if member.group == group)
        rows.append((group, *_figures([trials.get(digest) for digest in digests], running, price)))
    found = [trials.get(digest) for digest in dict.fromkeys(member.digest for member in wanted)]
    rows.append(("all", *_figures(found, running, price)))
    failed = [trial for trial in found if trial and has_failed(trial)]
    reasons = [f"failed: {title(trial)}: {trial.user_attrs['reason']}" for trial in failed]
    return [f"study {study.name}", *aligned(rows), *reasons, *_time_left(found, running)]


def _figures(trials: list[FrozenTrial | None], running: set[int], price: float | None) -> tuple[str, ...]:
    """Return the cells of a row after its name; None is a configuration without a trial."""
    found = [trial for trial in trials if trial]
    done = [trial for trial in found if trial.state == TrialState.COMPLETE]
    failed = [trial for trial in found if has_failed(trial)]
    cancelled = sum(trial.state == TrialState.FAIL for trial in found) - len(failed)
    alive = [trial for trial in found if not trial.state.is_finished() and trial.number in running]
    queued = sum(not trial.state.is_finished() for trial in found) - len(alive)
    hours = sum(map(taken_by, found))
    costs = list(_of_ended(found, "cost")) if price is None else [hours * price]
    counts = (queued, len(alive), len(done), len(failed), cancelled, len(trials) - len(found))
    return (*map(str, counts), f"{hours:.2f}", f"${sum(costs):,.2f}" if costs else "not known")


def _time_left(found: list[FrozenTrial | None], running: set[int]) -> list[str]:
    """Return the line about the time left; the trials that are done say how long one takes."""
    left = sum(trial is None or not trial.state.is_finished() for trial in found)
    done = [trial for trial in found if trial and trial.state == TrialState.COMPLETE]
    if not left:
        return ["every trial has ended"]
    still_left = display.left(left, "trial")
    if not done:
        return [f"{still_left}; how long one takes is not known before one is done"]
    seconds = sum(_of_ended(done, "wall_seconds")) / len(done)
    workers = sum(trial is not None and trial.number in running for trial in found)
    at_once = f"with {workers} workers" if workers else "with one worker"
    return [f"{still_left}, about {duration(left * seconds / max(1, workers))} {at_once}"]


def _of_ended(trials: Iterable[FrozenTrial], name: str) -> Iterable[float]:
    """Return a figure of each trial that has it."""
    return (trial.user_attrs[name] for trial in trials if trial.user_attrs.get(name) is not None)
