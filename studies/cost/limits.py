# SPDX-License-Identifier: Apache-2.0
"""The limits of `sweep.py run`, which its workers get: chip-hours, and disk for checkpoints."""

import dataclasses

KEEP = ("all", "best", "last", "none")


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a run of a study.

    Attributes:
      budget: most chip-hours that all trials of the study may take; None: no budget.
      rehearsed: chip-hours of a trial by the digest of its configuration, where a rehearsal says so.
      price: dollars per chip-hour; None: the preset's.
      keep: which checkpoints of ended trials stay, of KEEP; see studies/cost/retention.py.
      groups: the digests of each group's configurations, of the whole study.
    """

    budget: float | None = None
    rehearsed: dict[str, float] = dataclasses.field(default_factory=dict)
    price: float | None = None
    keep: str = "all"
    groups: dict[str, list[str]] = dataclasses.field(default_factory=dict)
