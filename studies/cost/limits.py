# SPDX-License-Identifier: Apache-2.0
"""The limits of `sweep.py run`, which its workers get: chip-hours, and disk for checkpoints."""

import dataclasses

KEEP = ("all", "best", "last", "none")


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a run of a study."""

    budget: float | None = None  # most chip-hours that all trials of the study may take; None: no budget
    # chip-hours of a trial by the digest of its configuration, where a rehearsal says so
    rehearsed: dict[str, float] = dataclasses.field(default_factory=dict)
    price: float | None = None  # dollars per chip-hour; None: the preset's
    keep: str = "all"  # which checkpoints of ended trials stay, of KEEP; see studies/cost/retention.py
    groups: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # digests of each whole group
