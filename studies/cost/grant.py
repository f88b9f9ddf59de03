# SPDX-License-Identifier: Apache-2.0
"""Which part of a plan fits into a grant of chip time: in which order, how many hours, at what cost, with which disk.

Trials are taken in the order of the study, and one that does not fit is left out. A queue whose budget is the grant
does the same, so the plan says what `sweep.py run --budget` would do.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping

from reporting.display import aligned, counted, listed
from studies.cost.planning import Estimate, steps_of
from studies.outcome import chips_of
from studies.suites import Member, owners

HOURS_OF_DAY, DAYS_OF_MONTH, GB = 24, 30, 1e9
NAMED = 6  # trials that a line names
FITS, TOO_LONG, UNKNOWN = "fits", "does not fit", "not known, and not counted"


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


def share_out(grant: Grant, found: Mapping[str, Estimate]) -> dict[str, str]:
    """Return whether each trial fits, by digest: FITS, TOO_LONG or UNKNOWN.

    Trials are taken in the order of `found`. Trials of unknown cost take nothing.
    """
    used, share = 0.0, {}
    for digest, estimate in found.items():
        if estimate.hours is None:
            share[digest] = UNKNOWN
        elif used + estimate.hours * grant.chips > grant.chip_hours:
            share[digest] = TOO_LONG
        else:
            used += estimate.hours * grant.chips
            share[digest] = FITS
    return share


def lines(
    grant: Grant, members: list[Member], found: Mapping[str, Estimate], sizes: Mapping[str, int | None]
) -> list[str]:
    """Return the table by group, the sums, and what does not fit or is not known.

    `found` has `planning.estimates` of the members. `sizes` has a checkpoint's bytes by digest, None if not known.
    """
    share = share_out(grant, found)
    first = owners(members)
    fits = {digest: first[digest] for digest, verdict in share.items() if verdict == FITS}
    used = sum(found[digest].hours for digest in fits) * grant.chips
    per_hour = "a price that is not known" if grant.price is None else f"${grant.price:,.2f} a chip-hour"
    return [
        f"a grant of {_days(grant)} of {grant.topology}: {grant.chip_hours:,.2f} chip-hours, {per_hour}",
        *aligned(_by_group(grant, first, found, share)),
        f"fits: {len(fits)} of {len(found)} trials, {used:,.2f} chip-hours "
        f"({used / grant.chip_hours:.1%} of the grant), {_dollars(grant, used)}",
        *_named(TOO_LONG, first, share),
        *_named(UNKNOWN, first, share),
        _storage(grant, fits, sizes),
    ]


def _by_group(grant: Grant, first: dict[str, Member], found: Mapping[str, Estimate], share: dict) -> list[tuple]:
    rows = [("group", "trials", "fit", "do not fit", "not known", "chip-hours", "cumulated", "cost")]
    used = 0.0
    for group in dict.fromkeys(member.group for member in first.values()):
        own = [digest for digest, member in first.items() if member.group == group]
        count = collections.Counter(share[digest] for digest in own)
        hours = sum(found[digest].hours for digest in own if share[digest] == FITS) * grant.chips
        used += hours
        counts = (len(own), count[FITS], count[TOO_LONG], count[UNKNOWN])
        known = count[FITS] or not count[UNKNOWN]
        figures = (f"{hours:,.2f}", f"{used:,.2f}", _dollars(grant, hours)) if known else ("not known", "-", "-")
        rows.append((group, *map(str, counts), *figures))
    return rows


def _dollars(grant: Grant, chip_hours: float) -> str:
    return "cost not known" if grant.price is None else f"${chip_hours * grant.price:,.2f}"


def _days(grant: Grant) -> str:
    return f"{grant.days:g} {'day' if grant.days == 1 else 'days'}"


def _are(number: int) -> str:
    return f"{counted(number, 'trial')} {'is' if number == 1 else 'are'}"


def _named(verdict: str, first: dict[str, Member], share: dict[str, str]) -> list[str]:
    """Return a line that names the first of the trials with a verdict; none if there are none."""
    titles = [first[digest].title for digest, own in share.items() if own == verdict]
    return [f"{verdict}: {counted(len(titles), 'trial')}, {listed(titles, NAMED)}"] if titles else []


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
