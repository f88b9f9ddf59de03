# SPDX-License-Identifier: Apache-2.0
"""Hubs and lines for tests, with threads in place of processes; all know the same secret."""

import concurrent.futures
import threading

from cluster.addresses import listen
from cluster.hub import Hub
from cluster.line import Line
from cluster.secret import VARIABLE, Secret
from tests.groups import free_ports

SECRET = Secret(VARIABLE, b"known to the processes of the run alone")


def make_hub(port: int, count: int, join_seconds: float = 5.0, secret: Secret = SECRET) -> Hub:
    return Hub(listen("127.0.0.1", port), count, join_seconds, secret)


def make_line(
    port: int, index: int, count: int, join_seconds: float = 5.0, on_end=lambda *end: None, secret: Secret = SECRET
) -> Line:
    return Line(
        "localhost", port, index=index, count=count, join_seconds=join_seconds, on_end=on_end,
        find_secret=lambda: secret,
    )  # fmt: skip


class Member:
    """A line, and the messages that it got about the end of the run."""

    def __init__(self, port: int, index: int, count: int, join_seconds: float = 5.0):
        self.ended, self.end = threading.Event(), None
        self.line = make_line(port, index, count, join_seconds, self._on_end)
        self.line.join()

    def _on_end(self, line: str, status: int) -> None:
        self.end = self.end or (line, status)
        self.ended.set()


def members(count: int, hubs: list | None = None) -> list[Member]:
    """Return members that have joined; their hub is put into `hubs`."""
    port = free_ports()
    (hubs if hubs is not None else []).append(make_hub(port, count))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda index: Member(port, index, count), range(count)))
