# SPDX-License-Identifier: Apache-2.0
"""The schemas of the JSON that hosts and programs on them print.

Texts that are shown have a limited set of characters, so that they contain no control sequence of a terminal.
"""

from typing import Annotated, NotRequired

import pydantic

from files.json_reader import Object

UnixSeconds = Annotated[float, pydantic.Field(ge=0, lt=1e11)]  # by the clock of a host
Number = Annotated[int, pydantic.Field(ge=0, lt=2**48)]
Gib = Annotated[float, pydantic.Field(ge=0, lt=1e9)]
Figure = Annotated[float, pydantic.Field(allow_inf_nan=False)] | None
Text = Annotated[str, pydantic.Field(pattern=r"^[^\x00-\x1f\x7f]{0,500}$")]
Digest = Annotated[str, pydantic.Field(pattern="^[0-9A-Za-z._-]{0,64}$")]


class Heartbeat(Object):
    """The heartbeat of a process of train.py, see cluster/watch.py."""

    step: Number
    phase: Annotated[str, pydantic.Field(pattern="^[a-z_ ]{1,20}$")]
    time: UnixSeconds
    code: Digest
    host_memory_gib: NotRequired[Gib]
    device_memory_gib: NotRequired[list[Gib] | None]


class Answer(Object):
    """The status of a worker, see `status_line` in pods/hosts.py."""

    alive: bool
    pid: Number | None
    status: Annotated[int, pydantic.Field(ge=0, lt=256)] | None
    stopped: bool
    now: UnixSeconds
    started: UnixSeconds | None
    commit: Digest
    changed: Number
    rss_gib: Gib
    heartbeat: Heartbeat | None


class Progress(Object):
    """The file study.json of a study, see studies/progress.py."""

    trial: Annotated[str, pydantic.Field(pattern=r"^[^\x00-\x1f\x7f]{0,300}$")]
    workdir: Annotated[str, pydantic.Field(pattern=r"^[^\x00-\x1f\x7f]{0,1000}$")]
    time: UnixSeconds
    done: Number
    failed: Number
    left: Number
    pruned: NotRequired[Number]
    cancelled: NotRequired[Number]


class Configuration(Object):
    """The keys of a run's flat configuration that are read here."""

    train_steps: Annotated[int, pydantic.Field(ge=0, lt=2**31, alias="train.steps")]


class Trained(Object):
    """A step of scripts/check_host.py."""

    step: Number
    loss: Figure
    step_seconds: Figure
    tokens_per_second: Figure


class Point(Object):
    """A point of rehearsal/checklist.py."""

    name: Text
    verdict: Text
    evidence: Text


class Checked(Object):
    """The result of scripts/check_host.py on a host."""

    process: Number
    num_processes: Number
    num_devices: Number
    local_devices: Number
    device_kind: str
    simulated: bool
    versions: dict[str, str]
    not_as_locked: list[str]
    mesh: dict[str, Number]
    corpus: str
    corpus_tokens: Number
    trained: list[Trained]
    starts: list[Number]
    points: list[Point]
    heartbeat: bool
    log: bool


class Failed(Object):
    """Why a step could not be compiled ahead of time."""

    error: Text


class Rehearsed(Object):
    """The figures of a step that was compiled ahead of time (rehearsal/layouts/ways.py); no time if it does not fit."""

    fits: bool
    step_seconds: Figure
    memory_gib_per_device: Gib
    mesh: dict[Digest, Number]


class Ahead(Object):
    """The result of scripts/check_host.py --ahead on a host whose devices a run holds."""

    versions: dict[str, str]
    not_as_locked: list[str]
    corpus: str
    corpus_tokens: Number
    rehearsed: Failed | Rehearsed | None


class Given(Object):
    """The switches of a report."""

    given: dict[str, bool]


class Report(Object):
    """The keys that are read from the report of scripts/deploy_optimizations.py."""

    switches: Given
