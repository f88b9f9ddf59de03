# SPDX-License-Identifier: Apache-2.0
"""What process 0 shares is enough for another process to decode the same; test_hosts.py has real ones."""

import json

import numpy as np
import pytest

from inference.batching import Batch, Request
from inference.choice import Sampling
from serving import following
from tests.inference.test_batching import GREEDY, V, engine, prompts

HOW = Sampling(0.7, 12, 0.9, 0.01, 1.3, {3: 1.5, 7: -2.0}, seed=2**40 + 1)


@pytest.fixture
def messages(monkeypatch) -> list[str]:
    """What process 0 shares, as it goes through the hub."""
    sent = []
    monkeypatch.setattr(following.processes, "shared", lambda topic, make: sent.append(json.dumps(make())))
    monkeypatch.setattr(following.signal, "signal", lambda *unused: None)
    return sent


class Remembering(Batch):
    """A batch that remembers its continuations."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.all = []

    def add(self, request):
        """Queue a request."""
        self.all.append(super().add(request))
        return self.all[-1]


def test_a_batch_that_follows_decodes_the_same(messages, monkeypatch):
    leading = following.LeadingBatch(engine(), num_rows=2, vocab_size=V)
    asked = prompts([5, 40, 9, 3, 20])
    requests = [
        Request(asked[0], 12, GREEDY), Request(asked[1], 6, HOW, ends={4, 9}), Request(asked[2], 3, HOW),
        Request(asked[3], 5, GREEDY, first_V=np.arange(V - 1) % 3 == 1, wants_top=True), Request(asked[4], 4, HOW),
    ]  # fmt: skip
    ones = [leading.add(request) for request in requests[:4]]
    leading.step()
    leading.step()
    leading.cancel(ones[0])
    leading.cancel(ones[2])  # waits
    ones.append(leading.add(requests[4]))
    while not all(one.reason for one in ones):
        leading.step()
    following.end_following()
    replayed = map(json.loads, messages)
    monkeypatch.setattr(following.processes, "shared", lambda topic, make: next(replayed))
    batch = Remembering(engine(), num_rows=2, vocab_size=V)
    following.follow(batch)
    assert [one.reason for one in ones] == ["cancelled", ones[1].reason, "cancelled", "length", "length"]
    for leader, follower in zip(ones, batch.all, strict=True):
        for name in ("tokens", "log_probs", "tops", "reason"):
            assert getattr(follower, name) == getattr(leader, name)
    assert batch._cached == leading._cached and batch.num_shared_tokens == leading.num_shared_tokens


def test_changes_of_many_tokens_are_several_messages_in_order(monkeypatch):
    """The hub refuses messages that are too long, and ends all processes."""
    monkeypatch.setattr(following, "MOST_TOKENS", 10)
    monkeypatch.setattr(following, "TOKENS_OF_REST", 0)
    changes = [{"add": {"prompt": [0] * size}} for size in (4, 6, 20, 3)] + [{"cancel": 0}, following.STEP]
    messages = list(following.messages_of(changes))
    assert [change for message in messages for change in message] == changes
    assert [len(message) for message in messages] == [2, 1, 3]
