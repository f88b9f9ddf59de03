# SPDX-License-Identifier: Apache-2.0
"""What a study takes: steps, hours and cost of each configuration, from recorded rehearsals and not from guesses."""

import dataclasses
from collections.abc import Mapping

from reporting.display import aligned, counted
from settings import ramp
from settings.keys import from_flat
from studies.cost import rehearsals
from studies.outcome import HOUR, chips_of, price_of
from studies.suites import Member, Study

UNREHEARSED = "not known: rehearse them first, by --rehearse"
UNCOUNTED = "not known: only the data say how many steps their epochs have"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a configuration takes; None where it is not known."""

    steps: int | None  # number of updates
    hours: float | None  # of the whole slice
    cost: float | None  # in dollars
    is_measured: bool = False  # whether the hours are those of a trial that is done


def estimates(
    members: list[Member], topology: str, price: float | None = None, measured: Mapping[str, float] | None = None
) -> dict[str, Estimate]:
    """Return the estimate of each different configuration that can run, by its digest, in order.

    Args:
      topology: hardware preset; "": only the steps are known.
      price: dollars per chip-hour; None: that of the preset.
      measured: hours of the whole slice that trials took, by digest; they take precedence over rehearsals.
    """
    different = {member.digest: member for member in members if not member.refusal}
    measured = measured or {}
    return {digest: estimate_of(one, topology, price, measured.get(digest)) for digest, one in different.items()}


def estimate_of(member: Member, topology: str, price: float | None = None, measured: float | None = None) -> Estimate:
    """Return the estimate for one configuration; see `estimates`."""
    steps, hours = steps_of(member.values), measured
    if hours is None and topology and steps is not None:
        seconds = rehearsals.step_seconds(member.values, topology)
        hours = None if seconds is None else full_batches(member.values, steps) * seconds / HOUR
    price = price_of(topology, price)
    cost = None if hours is None or price is None else hours * chips_of(topology) * price
    return Estimate(steps, hours, cost, measured is not None)


def steps_of(values: dict[str, object]) -> int | None:
    """Return the number of updates; None if only the data say how many there are."""
    return values["train.steps"] or ramp.known_steps(from_flat(values))  # few need the configuration, which takes time


def full_batches(values: dict[str, object], steps: int) -> float:
    """Return how many batches without a ramp have as many examples as the first `steps` updates."""
    return ramp.num_examples(from_flat(values), steps) / values["train.global_batch"]


def table(study: Study, members: list[Member], topology: str, found: Mapping[str, Estimate]) -> list[str]:
    """Return the lines of a plan: what each configuration varies and takes, what is refused, and the sums.

    `found` has the `estimates` of the members.
    """
    owners, rows = {}, [("configuration", "steps", "hours", "cost", "what differs")]
    for member in members:
        changes = ", ".join(f"{key}={value}" for key, value in changed(study, member).items()) or "nothing"
        if member.refusal:
            rows.append((member.title, "-", "-", "-", f"refused: {member.refusal}"))
        elif owner := owners.get(member.digest):
            rows.append((member.title, "-", "-", "-", f"equals {owner}, whose trial it shares"))
        else:
            owners[member.digest] = member.title
            rows.append((member.title, *_words(found[member.digest]), changes))
    lines = [*aligned(rows), f"{counted(len(members), 'configuration')}, {counted(len(owners), 'trial')}"]
    if not topology:
        return [*lines, "hours and cost: name a slice with --topology"]
    return [*lines, *_sums(topology, list(found.values()))]


def _sums(topology: str, found: list[Estimate]) -> list[str]:
    known = [one for one in found if one.hours is not None]
    hours, uncounted = sum(one.hours for one in known), sum(one.steps is None for one in found if one.hours is None)
    unknown = {UNREHEARSED: len(found) - len(known) - uncounted, UNCOUNTED: uncounted}
    costs = [one.cost for one in known if one.cost is not None]
    cost = f", ${sum(costs):,.2f}" if costs else ""
    measured = sum(one.is_measured for one in known)
    note = f"; {measured} of them are done, with their measured hours" if measured else ""
    return [
        f"training of {counted(len(known), 'trial')} on {topology}, one after the other: {hours:,.2f} h{cost}{note}",
        *(f"{counted(number, 'trial')}: {why}" for why, number in unknown.items() if number),
    ]


def changed(study: Study, member: Member) -> dict[str, object]:
    """Return the keys by which a configuration differs from its base."""
    return study.groups[member.group].of_size(study.base.size)[member.plain_name]


def _words(estimate: Estimate) -> tuple[str, str, str]:
    steps = "-" if estimate.steps is None else f"{estimate.steps:,}"
    hours = "not known" if estimate.hours is None else f"{estimate.hours:.2f}"
    return steps, hours, "not known" if estimate.cost is None else f"${estimate.cost:,.2f}"
