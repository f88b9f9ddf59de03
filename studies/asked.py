# SPDX-License-Identifier: Apache-2.0
"""What a command line of sweep.py asks for: a study, its configurations, their hours, and its limits."""

import contextlib
import functools
import importlib.util

from configs.errors import ConfigError
from reporting.display import counted
from studies import suites
from studies.cost import planning
from studies.cost.limits import Limits


class StudyRequest:
    """What the command line asks for: a study, the names of some of its groups, and their resolved configurations."""

    def __init__(self, name: str, parsed, overrides: dict[str, str]):
        """`parsed` are the flags of sweep.py, and `overrides` typed text by dotted key."""
        self.parsed, self.topology = parsed, parsed.topology
        self.study, self.groups = suites.find(name, parsed.base)
        self.how = dict(seeds=parsed.seeds, topology=parsed.topology, overrides=overrides)
        self.members = suites.members(self.study, self.groups, **self.how)
        if not self.members:
            raise ConfigError(f"{name} has no configurations for --base={self.study.base.size}")
        self.root = suites.runs_of(parsed.root or f"runs/{self.study.name}")

    @property
    def runnable(self) -> list[suites.Member]:
        """The configurations that are not refused."""
        return [member for member in self.members if not member.refusal]

    @property
    def digests(self) -> set[str]:
        """The digests of all configurations that can run."""
        return {member.digest for member in self.runnable}

    @functools.cached_property
    def owners(self) -> dict[str, suites.Member]:
        """The first member with each digest, in the counted groups if all of them are asked for, else in all."""
        is_whole = self.groups == self.study.counted
        return suites.owners(self.members if is_whole else suites.members(self.study, self.study.groups, **self.how))

    def orders(self) -> list:
        """Return an order for each different configuration, whose owner names its folder."""
        from studies.trials import order_of

        wanted = self.digests
        return [
            order_of(owner, suites.folder(self.root, owner), self.topology)
            for digest, owner in self.owners.items() if digest in wanted
        ]  # fmt: skip

    def others(self, trials: dict) -> list[str]:
        """Return a line about trials of these groups that were started with other keys or seeds; [] if there are none.

        `trials` has the last trial of each configuration by its digest.
        """
        meant = self.owners
        count = sum(one.user_attrs["group"] in self.groups and digest not in meant for digest, one in trials.items())
        if not count:
            return []
        started = f"{counted(count, 'more trial')} {'was' if count == 1 else 'were'} started"
        return [f"{started} with other keys or --seeds; give what `run` was given"]

    def queue(self, *, create: bool):
        """Return the queue of the study; ConfigError if there is none and it is not to be created."""
        from studies.storage import open_storage
        from studies.trials import Queue

        storage = open_storage(self.parsed.storage, create=create)
        return Queue(storage, self.study.name, self.study.suite.direction, create=create)


def estimates(asked: StudyRequest) -> tuple[dict, dict]:
    """Return (estimates by digest, trials of the study by digest). Without a database there are no trials."""
    trials, measured = {}, {}
    if importlib.util.find_spec("optuna"):
        from studies.cost import budget
        from studies.storage import reaching

        # There is no study yet; `run` reports a storage that cannot be used.
        with contextlib.suppress(ConfigError), reaching():
            trials = asked.queue(create=False).latest()
        measured = budget.measured_hours(trials.values(), asked.topology)
    return planning.estimates(asked.members, asked.topology, asked.parsed.price, measured), trials


def limits_of(asked: StudyRequest) -> Limits:
    """Return the limits of the command line, with what they need to know of the study."""
    parsed, rehearsed, groups = asked.parsed, {}, {}
    if parsed.budget is not None:
        chips = planning.chips_of(asked.topology)
        found = planning.estimates(asked.members, asked.topology)
        rehearsed = {digest: one.hours * chips for digest, one in found.items() if one.hours is not None}
    if parsed.keep == "best":
        for member in suites.members(asked.study, asked.study.groups, **asked.how):
            if not member.refusal:
                groups.setdefault(member.group, []).append(member.digest)
    return Limits(parsed.budget, rehearsed, parsed.price, parsed.keep, groups)
