# SPDX-License-Identifier: Apache-2.0
"""The messages between the processes of a run: one JSON object per line, each validated against a schema on read."""

import contextlib
import json
import select
import socket
from collections.abc import Mapping
from typing import BinaryIO

from cluster.blame import Heartbeat
from files.json_reader import JsonError, Object, parse_json

LONGEST_JOIN = 4096  # bytes of a line
# Votes on puzzles are the longest values: up to 750 bytes for each answer that differs from the others. Digests of the
# code and of a checkpoint take kilobytes.
LONGEST_MESSAGE = 1 << 30
# The kernel probes a silent peer even while Python is busy, so that a lost machine is detected within 20 s.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}


class Message(Object):
    """The fields of every message."""

    kind: str


class Join(Message):
    """The first message of a process: its index, the number of processes in its configuration, and its host."""

    index: int
    count: int
    host: str


class Value(Message):
    """A process's value for a topic."""

    topic: str
    value: object


class Stop(Message):
    """A process asks all to stop soon; `passed` is the number of boundaries that it has passed."""

    passed: int


class Promise(Message):
    """A process promises not to pass `boundary`; `passed` is the number of boundaries that it has passed."""

    boundary: int
    passed: int


class HeartbeatMessage(Message):
    """A heartbeat; None ends the heartbeats."""

    heartbeat: Heartbeat | None


class End(Message):
    """The reason why a process, or the run, ends, and its exit status."""

    line: str
    status: int


class Joined(Message):
    """All processes have joined, on these hosts."""

    hosts: list[str]


class Values(Message):
    """The values of all processes for a topic."""

    topic: str
    values: list[object]


class Boundary(Message):
    """A boundary that is proposed for the stop, or agreed."""

    boundary: int


class Blame(Message):
    """Asks which process blocks the run; the answer is "" if it made progress within the last `allowed` seconds."""

    allowed: float


class Blamed(Message):
    """A description of the process that blocks the run."""

    text: str


JOINING = {"join": Join}
TO_HUB = {
    "value": Value, "stop": Stop, "promise": Promise, "heartbeat": HeartbeatMessage, "blame": Blame, "failed": End,
    "leave": Message,
}  # fmt: skip
FROM_HUB = {
    "joined": Joined, "values": Values, "propose": Boundary, "stop": Boundary, "blame": Blamed, "end": End,
}  # fmt: skip


def read(lines: BinaryIO, schemas: Mapping[str, type], longest: int = LONGEST_MESSAGE) -> dict | None:
    """Return the next message, of a kind in `schemas`; None at the end of the stream or for an incomplete line.

    Raises:
      JsonError: the line is longer than `longest` bytes, or is not a valid message of such a kind.
      OSError: the connection failed or timed out.
    """
    line = lines.readline(longest + 1)
    if not line.endswith(b"\n"):
        if len(line) > longest:
            raise JsonError(f"a message is longer than {longest:,} bytes")
        return None
    kind = parse_json(line, Message, "a message", max_bytes=longest + 1)["kind"]
    if kind not in schemas:
        raise JsonError(f"a message of the kind {kind[:40]!r} is not one of {', '.join(schemas)}")
    return parse_json(line, schemas[kind], f"a message of the kind {kind!r}", max_bytes=longest + 1)


def send(connection: socket.socket, message: dict) -> None:
    """Send a message; a broken connection is ignored here, since its reader notices it."""
    line = json.dumps(message, ensure_ascii=False).encode(errors="replace") + b"\n"
    with contextlib.suppress(OSError):
        connection.sendall(line)


def keep_alive(connection: socket.socket) -> None:
    """Remove the timeout, and enable TCP keepalive: the connection may be silent as long as the peer's host is up."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if option := vars(socket).get(name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def has_room(connection: socket.socket) -> bool:
    """Return whether a short message can be sent without blocking; ValueError if the connection is closed."""
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(0))
