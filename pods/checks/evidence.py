# SPDX-License-Identifier: Apache-2.0
"""The evidence by which `pod.py validate` judges whether a pod is ready to train, and an item of its table."""

import dataclasses
from typing import NamedTuple

from pods.answers import Ahead, Checked
from pods.settings import Settings
from pods.switches import Resolved
from pods.transports import Result
from pods.watch import Worker

UNREACHED = "the run on the hosts did not get this far"


class Item(NamedTuple):
    """One line of the table; `ready` is None if it can only be checked on a free pod."""

    name: str
    ready: bool | None
    evidence: str

    @property
    def verdict(self) -> str:
        """The verdict in the table that is printed."""
        return {True: "ready", False: "NOT READY", None: "waits"}[self.ready]


@dataclasses.dataclass
class Found:
    """The evidence for all checks."""

    settings: Settings
    pod: dict
    workers: list[Worker]
    switches: Resolved
    workdir: str
    outputs: list[Result]
    checks: list[Checked | Ahead | None]  # the answer of each host's script, None if it printed none
    data: list[str] = dataclasses.field(default_factory=list)  # the buckets that the data are read from, as gs://NAME
    # numbers of the workers on which a run holds the devices; then `checks` are those of a busy pod
    busy: list[int] = dataclasses.field(default_factory=list)

    @property
    def answers(self) -> dict[int, dict]:
        """The answers of the workers whose script gave one, by worker number."""
        return {number: check for number, check in enumerate(self.checks) if check}

    @property
    def first(self) -> dict:
        """The answer of process 0; on a busy pod, where each host answers for itself, the first."""
        return next((check for check in self.answers.values() if check.get("process", 0) == 0), {})

    @property
    def rehearsed(self) -> dict:
        """The step as the coordinator of a busy pod compiled it; {} if there is none."""
        return next((check["rehearsed"] for check in self.answers.values() if check.get("rehearsed")), {})

    def differences(self, key: str) -> list[str]:
        """Return a line for each worker whose value differs from the first worker's."""
        one, *_ = self.answers
        values = {number: check[key] for number, check in self.answers.items() if check[key] != self.answers[one][key]}
        return [f"{key} of worker {n} differs from worker {one}: {value}" for n, value in values.items()]
