# SPDX-License-Identifier: Apache-2.0
"""A budget of chip-hours: the queue starts no trial that is expected to exceed it, and a trial that reaches it saves.

Chip-hours are counted by the workers, in the database, from the start of each process of a trial to its end. So they
are known for trials whose folders are in a bucket, and include processes that failed.
"""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable

from optuna.trial import FrozenTrial, TrialState

from studies import trials
from studies.cost.limits import Limits
from studies.outcome import HOUR, chips_of, price_of
from studies.suites import SEED


def spent_on(trial: FrozenTrial) -> float:
    """Return the chip-hours that a trial has taken so far."""
    about = trial.user_attrs
    if trials.RAN_SECONDS in about:
        return about[trials.RAN_SECONDS] * chips_of(about["topology"]) / HOUR
    return about.get("chip_hours", 0.0)  # of a trial that ended before workers counted


def taken_by(trial: FrozenTrial) -> float:
    """Return the chip-hours of a trial and of the earlier trials that `retry` continued in it.

    They are at least those of the account in its folder, which also has what a lost database had counted.
    """
    about = trial.user_attrs
    counted = spent_on(trial) + about.get(trials.RAN_BEFORE, 0.0) * chips_of(about["topology"]) / HOUR
    return max(counted, about.get("chip_hours", 0.0))


def cost_of(found: Iterable[FrozenTrial], price: float | None = None) -> float | None:
    """Return the dollars of the chip-hours that trials have taken; None if the price of some is not known.

    Args:
      price: dollars per chip-hour, which may be 0; None: the price that a trial recorded, else one that another trial
        on the same topology recorded, else the preset's.
    """
    found, costs = list(found), []
    recorded = {trial.user_attrs["topology"]: each for trial in found if (each := _recorded_price(trial)) is not None}
    for trial in found:
        topology, hours = trial.user_attrs["topology"], taken_by(trial)
        own = _recorded_price(trial) if price is None else price
        a_chip_hour = price_of(topology, recorded.get(topology) if own is None else own)
        costs += [None if a_chip_hour is None else hours * a_chip_hour] if hours else []
    return None if None in costs else sum(costs)


def _recorded_price(trial: FrozenTrial) -> float | None:
    """Return the dollars per chip-hour of a trial that has ended; None if it recorded none."""
    about = trial.user_attrs
    is_known = about.get("cost") is not None and about.get("chip_hours")
    return about["cost"] / about["chip_hours"] if is_known else None


def spent(queue: trials.Queue) -> float:
    """Return the chip-hours that all trials of a study have taken so far."""
    return sum(map(spent_on, queue.everything()))


class Expectation:
    """How many chip-hours a trial takes in all.

    That is, in this order: the mean of trials of the same configuration with other seeds that are done, a rehearsal,
    or the mean of all trials of the study that are done on the same topology.
    """

    def __init__(self, known: Iterable[FrozenTrial], rehearsed: dict[str, float]):
        """Learn from the trials among `known` that are done."""
        self.rehearsed = rehearsed
        self._by_topology: dict[str, list[float]] = defaultdict(list)
        self._by_configuration: dict[tuple, list[float]] = defaultdict(list)
        for trial in known:
            if trial.state == TrialState.COMPLETE:
                self._by_topology[trial.user_attrs["topology"]].append(taken_by(trial))
                self._by_configuration[_configuration(trial)].append(taken_by(trial))

    def of(self, trial: FrozenTrial) -> float | None:
        """Return the chip-hours of a trial; None if nothing is known."""
        about = trial.user_attrs
        if same := self._by_configuration.get(_configuration(trial)):
            return statistics.fmean(same)
        if about["digest"] in self.rehearsed:
            return self.rehearsed[about["digest"]]
        done = self._by_topology.get(about["topology"])
        return statistics.fmean(done) if done else None


@dataclasses.dataclass(frozen=True)
class Account:
    """A budget at a moment, in chip-hours."""

    limit: float  # the budget
    spent: float  # by all trials of the study so far
    reserved: float  # what the running trials are expected to take from now on
    num_running: int  # number of running trials
    is_measuring: bool  # whether a trial of unknown cost runs
    expectation: Expectation  # of all trials

    def allows(self, trial: FrozenTrial) -> bool:
        """Return whether a waiting trial may start; a trial of unknown cost runs alone."""
        needs = still_needed(trial, self.expectation)
        if self.spent >= self.limit or self.is_measuring:
            return False
        if needs is None:
            return not self.num_running
        return self.spent + self.reserved + needs <= self.limit


def still_needed(trial: FrozenTrial, expectation: Expectation) -> float | None:
    """Return the chip-hours that a trial is expected to take from now on; None if nothing is known."""
    in_all = expectation.of(trial)
    return None if in_all is None else max(0.0, in_all - taken_by(trial))


def account(queue: trials.Queue, limits: Limits) -> Account:
    """Return the state of a study's budget."""
    known, running = queue.everything(), queue.running()
    expectation = Expectation(known, limits.rehearsed)
    needs = [
        still_needed(trial, expectation)
        for trial in known if trial.number in running and not trial.state.is_finished()
    ]  # fmt: skip
    return Account(
        limit=limits.budget,
        spent=sum(map(spent_on, known)),
        reserved=sum(hours for hours in needs if hours is not None),
        num_running=len(needs),
        is_measuring=None in needs,
        expectation=expectation,
    )


def claim_next(queue: trials.Queue, digests: set[str], limits: Limits) -> FrozenTrial | None:
    """Claim and return the first trial that fits into the budget; None if none fits now.

    Workers decide one after the other, so that they do not exceed the budget together.
    """
    with queue.locked("budget"):
        return queue.claim_next(digests, account(queue, limits).allows)


def reason_to_end(queue: trials.Queue, digests: set[str], limits: Limits, *, waits: bool = False) -> str:
    """Return the line that says that the budget ends the queue; "" if a waiting trial fits, or one of these runs.

    With `waits`, return "" also while a trial of another group runs: one of these may fit when it has ended.
    """
    if limits.budget is None:
        return ""
    latest, running = queue.latest(), queue.running()
    left = [trial for digest, trial in latest.items() if digest in digests and not trial.state.is_finished()]
    now = account(queue, limits)
    needs = [still_needed(trial, now.expectation) for trial in left]
    may_fit = now.spent < now.limit and any(hours is None or now.spent + hours <= now.limit for hours in needs)
    if not left or any(trial.number in running for trial in left) or any(map(now.allows, left)):
        return ""
    if waits and now.num_running and may_fit:
        return ""
    known = [hours for hours in needs if hours is not None]
    about = f"; all that are left take about {sum(known):,.2f} more" if len(known) == len(needs) else ""
    return (
        f"the budget of {limits.budget:,.2f} chip-hours ends the queue: {now.spent:,.2f} are spent, "
        f"{max(0.0, limits.budget - now.spent):,.2f} are left, and no trial fits{about}; raise --budget to continue"
    )


def left_of(what: str, chip_hours: float, queue: trials.Queue, price: float | None) -> str:
    """Return the line that says how much of a budget or a grant is spent and left.

    `price` is in dollars per chip-hour; None if it is not known.
    """
    used = spent(queue)
    rest = max(0.0, chip_hours - used)
    cost = "" if price is None else f" (${rest * price:,.2f})"
    return f"{what}: {chip_hours:,.2f} chip-hours, {used:,.2f} spent, {rest:,.2f} left{cost}"


def measured_hours(known: Iterable[FrozenTrial], topology: str) -> dict[str, float]:
    """Return, by digest, the hours of the whole slice that trials of a topology took; only those that are done."""
    return {
        trial.user_attrs["digest"]: taken_by(trial) / chips_of(topology)
        for trial in known if trial.state == TrialState.COMPLETE and trial.user_attrs["topology"] == topology
    }  # fmt: skip


def _configuration(trial: FrozenTrial) -> tuple:
    about = trial.user_attrs
    return about["topology"], frozenset((key, value) for key, value in about["config"].items() if key != SEED)
