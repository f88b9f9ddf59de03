# SPDX-License-Identifier: Apache-2.0
"""Which part of a plan fits into a grant of chip time: in which order, how many hours, at what cost, with which disk.

Trials are taken in the order of the study, and one that does not fit is left out. A queue whose budget is the grant
does the same, so the plan says what `sweep.py run --budget` would do.
"""

import dataclasses
import math
from collections.abc import Mapping

from reporting.display import aligned, counted, listed
from studies.cost.planning import Estimate, steps_of
from studies.outcome import chips_of
from studies.suites import Member, owners

HOURS_OF_DAY, DAYS_OF_MONTH, GB = 24, 30, 1e9
NAMED = 6  # trials that a line names


@dataclasses.dataclass(frozen=True)
class Grant:
    """Time on a slice."""

    days: float  # of the whole slice
    topology: str  # hardware preset
    price: float | None  # dollars per chip-hour; 0 is a price, None is not known
    storage_price: float | None  # dollars per GB (1e9 bytes) and month of 30 days; None is not known
    keep: str  # which checkpoints stay, of limits.KEEP

    @property
    def chips(self) -> int:
        """The chips of the slice."""
        return chips_of(self.topology)

    @property
    def chip_hours(self) -> float:
        """The chip-hours of the grant."""
        return self.days * HOURS_OF_DAY * self.chips


@dataclasses.dataclass(frozen=True)
class Share:
    """How a grant is shared out: digests of trials that fit, that do not, and of which nothing is known."""

    fits: list[str]
    too_long: list[str]
    unknown: list[str]


def share_out(grant: Grant, found: Mapping[str, Estimate]) -> Share:
    """Return which trials fit, taken in the order of `found`; those of which nothing is known take nothing."""
    used, share = 0.0, Share([], [], [])
    for digest, estimate in found.items():
        if estimate.hours is None:
            share.unknown.append(digest)
        elif used + estimate.hours * grant.chips > grant.chip_hours:
            share.too_long.append(digest)
        else:
            used += estimate.hours * grant.chips
            share.fits.append(digest)
    return share


def lines(
    grant: Grant, members: list[Member], found: Mapping[str, Estimate], sizes: Mapping[str, int | None]
) -> list[str]:
    """Return the table by group, the sums, and what does not fit or is not known.

    `found` are `planning.estimates` of the members; `sizes` the bytes of a checkpoint by digest, None if not known.
    """
    share = share_out(grant, found)
    first = owners(members)
    used = sum(found[digest].hours for digest in share.fits) * grant.chips
    titles = {digest: member.title for digest, member in first.items()}
    per_hour = "a price that is not known" if grant.price is None else f"${grant.price:,.2f} a chip-hour"
    return [
        f"a grant of {_days(grant)} of {grant.topology}: {grant.chip_hours:,.2f} chip-hours, {per_hour}",
        *aligned(_by_group(grant, first, found, share)),
        f"fits: {len(share.fits)} of {len(found)} trials, {used:,.2f} chip-hours "
        f"({used / grant.chip_hours:.1%} of the grant), {_dollars(grant, used)}",
        *_named("does not fit", [titles[digest] for digest in share.too_long]),
        *_named("not known, and not counted", [titles[digest] for digest in share.unknown]),
        _storage(grant, {digest: first[digest] for digest in share.fits}, sizes),
    ]


def _by_group(grant: Grant, first: dict[str, Member], found: Mapping[str, Estimate], share: Share) -> list[tuple]:
    rows = [("group", "trials", "fit", "do not fit", "not known", "chip-hours", "cumulated", "cost")]
    used = 0.0
    for group in dict.fromkeys(member.group for member in first.values()):
        own = [digest for digest, member in first.items() if member.group == group]
        fits = [digest for digest in own if digest in share.fits]
        hours = sum(found[digest].hours for digest in fits) * grant.chips
        used += hours
        unknown = sum(digest in share.unknown for digest in own)
        counts = (len(own), len(fits), len(own) - len(fits) - unknown, unknown)
        known = bool(fits) or not unknown
        figures = (f"{hours:,.2f}", f"{used:,.2f}", _dollars(grant, hours)) if known else ("not known", "-", "-")
        rows.append((group, *map(str, counts), *figures))
    return rows


def _dollars(grant: Grant, chip_hours: float) -> str:
    return "cost not known" if grant.price is None else f"${chip_hours * grant.price:,.2f}"


def _days(grant: Grant) -> str:
    return f"{grant.days:g} {'day' if grant.days == 1 else 'days'}"


def _are(number: int) -> str:
    return f"{counted(number, 'trial')} {'is' if number == 1 else 'are'}"


def _named(what: str, titles: list[str]) -> list[str]:
    """Return a line that names the first of some trials; none if there are none."""
    if not titles:
        return []
    return [f"{what}: {counted(len(titles), 'trial')}, {listed(titles, NAMED)}"]


def _storage(grant: Grant, kept: dict[str, Member], sizes: Mapping[str, int | None]) -> str:
    """Return the line about the checkpoints of trials that fit, with their price for the time of the grant."""
    counts = {digest: checkpoints_of(member, grant.keep) for digest, member in kept.items()}
    if grant.keep == "best":  # the largest for each group that has a trial
        by_size = sorted(kept, key=lambda digest: math.inf if sizes[digest] is None else sizes[digest])
        counts = dict.fromkeys({kept[digest].group: digest for digest in by_size}.values(), 1)
    begins = f"storage with --keep={grant.keep}: {counted(sum(counts.values()), 'checkpoint')}"
    unknown = sum(sizes[digest] is None for digest, count in counts.items() if count)
    if unknown:
        return f"{begins}, size and cost not known: {_are(unknown)} neither rehearsed here nor done"
    size = sum(count * sizes[digest] for digest, count in counts.items() if count) / GB
    if grant.storage_price is None:
        return f"{begins}, at most {size:,.2f} GB, cost not known: give --storage_price"
    cost = size * grant.storage_price * grant.days / DAYS_OF_MONTH
    return f"{begins}, at most {size:,.2f} GB, ${cost:,.2f} for {_days(grant)}"


def checkpoints_of(member: Member, keep: str) -> int:
    """Return how many checkpoints a trial has at most when it has ended."""
    if keep != "all":
        return int(keep != "none")
    values = member.values
    every, steps = values["checkpoint.keep_every"], steps_of(values) or 0
    return values["checkpoint.keep"] + values["checkpoint.keep_best"] + (steps // every if every else 0)
