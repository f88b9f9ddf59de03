# SPDX-License-Identifier: Apache-2.0
"""A batch on the mesh of several processes: process 0 decides what it decodes, and the others repeat it.

All processes must start the same programs in the same order with the same inputs. A batch is deterministic: its
programs follow from what is added and cancelled, and from its steps. So before each step, process 0 shares what was
added and cancelled since the last one.

An idle server shares nothing. The others then wait for a message of the hub (cluster/line.py), without a time limit,
and not in a collective of the devices, which would time out. The hub ends all processes if one of them dies.
"""

import dataclasses
import itertools
import signal
from collections.abc import Iterator, Sequence

import numpy as np

from cluster import processes
from inference.batching import Batch, Continuation, Request
from inference.choice import Sampling

TOPIC = "serving"
MOST_TOKENS = 1 << 20  # in a message, whose length is limited
TOKENS_OF_REST = 1 << 14  # at most the length of a request without its prompt


STEP: dict = {}  # the change after which the batch steps


class LeadingBatch(Batch):
    """The batch of process 0, which the other processes repeat, if there are any."""

    def __init__(self, *args, **how):
        """Make a batch; the other processes must make an equal one."""
        super().__init__(*args, **how)
        self._changes: list[dict] = []  # since the last step
        self._numbers: dict[Continuation, int] = {}  # of those that go on
        self._count = itertools.count()

    def add(self, request: Request) -> Continuation:
        """Queue a request here, and in the other processes at the next step."""
        one = super().add(request)
        self._numbers[one] = next(self._count)
        self._changes.append({"add": as_json(request)})
        return one

    def cancel(self, one: Continuation) -> None:
        """End a continuation here, and in the other processes at the next step."""
        if one in self._numbers:
            self._changes.append({"cancel": self._numbers.pop(one)})
        super().cancel(one)

    def step(self) -> list[Continuation]:
        """Step in all processes."""
        changes, self._changes = [*self._changes, STEP], []
        for part in messages_of(changes):
            processes.shared(TOPIC, lambda: part)  # noqa: B023, called at once
        changed = super().step()
        for one in changed:
            if one.reason:
                self._numbers.pop(one)
        return changed


def ignore_signals() -> None:
    """Leave signals to process 0."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def follow(batch: Batch) -> None:
    """Repeat what process 0 does with its batch, until it ends."""
    ones: dict[int, Continuation] = {}
    count = itertools.count()
    while (changes := processes.shared(TOPIC, lambda: None)) is not None:
        for change in changes:
            if "add" in change:
                ones[next(count)] = batch.add(of_json(change["add"]))
            elif "cancel" in change:
                batch.cancel(ones.pop(change["cancel"]))
            else:
                batch.step()
                ones = {number: one for number, one in ones.items() if not one.reason}


def end_following() -> None:
    """End `follow` in the other processes, if there are any."""
    processes.shared(TOPIC, lambda: None)


def messages_of(changes: Sequence[dict]) -> Iterator[list[dict]]:
    """Yield the changes in order, in messages of at most MOST_TOKENS; a longer change is a message of its own."""
    message, room = [], MOST_TOKENS
    for change in changes:
        size = TOKENS_OF_REST + len(change["add"]["prompt"]) if "add" in change else 0
        if message and size > room:
            yield message
            message, room = [], MOST_TOKENS
        message.append(change)
        room -= size
    yield message


def as_json(request: Request) -> dict:
    """Return a request as JSON."""
    how = dataclasses.asdict(request.sampling) | {"logit_bias": list(request.sampling.logit_bias.items())}
    first_V = None if request.first_V is None else [len(request.first_V), np.packbits(request.first_V).tobytes().hex()]
    return {
        "prompt": list(request.prompt), "max_tokens": request.max_tokens, "sampling": how, "ends": list(request.ends),
        "first_V": first_V, "wants_top": request.wants_top, "redrawn": request.redrawn,
    }  # fmt: skip


def of_json(given: dict) -> Request:
    """Return the request that `as_json` was called with."""
    how = given["sampling"] | {"logit_bias": dict(given["sampling"]["logit_bias"])}
    first_V = None
    if given["first_V"]:
        size, text = given["first_V"]
        first_V = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=size).astype(bool)
    return Request(**given | {"sampling": Sampling(**how), "first_V": first_V})
