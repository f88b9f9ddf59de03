# SPDX-License-Identifier: Apache-2.0
"""The messages between the processes of a run: JSON, one to a line, each checked against a schema as it is read."""

import contextlib
import json
import select
import socket
from collections.abc import Mapping
from typing import BinaryIO

from files.json_reader import JsonError, Object, parse_json
from parallelism.blame import Heartbeat

LONGEST_JOIN = 4096  # bytes of a line
# Votes on puzzles are the longest values, some megabytes; digests of the code and of a checkpoint take kilobytes.
LONGEST_MESSAGE = 64 << 20
# The kernel asks a silent neighbour for a sign of life, whatever Python is busy with: a lost machine shows in 20 s.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}


class Message(Object):
    """What every message has."""

    kind: str


class Join(Message):
    """The first message of a process: its number, the count of processes in its configuration, and its machine."""

    index: int
    count: int
    host: str


class Value(Message):
    """A process's value of a topic."""

    topic: str
    value: object


class Stop(Message):
    """A process asks all to stop soon; it has passed so many boundaries."""

    passed: int


class Promise(Message):
    """A process will not pass a boundary; it has passed so many."""

    boundary: int
    passed: int


class HeartbeatMessage(Message):
    """A heartbeat; None: there will be no more."""

    heartbeat: Heartbeat | None


class End(Message):
    """Why a process, or the run, ends, and with which exit status."""

    line: str
    status: int


class Joined(Message):
    """All are there, on these machines."""

    hosts: list[str]


class Values(Message):
    """The values of a topic, of all processes."""

    topic: str
    values: list[object]


class Boundary(Message):
    """A boundary that is proposed, or at which all stop."""

    boundary: int


class Blame(Message):
    """Asks who is to blame, unless who is furthest behind got on within the seconds that are allowed."""

    allowed: float


class Blamed(Message):
    """Who is to blame, in words."""

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
    """Return the next message, of a kind that `schemas` has; None at the end, and for a line that breaks off.

    Raises:
      JsonError: the line is longer than `longest` bytes, or is no such message.
      OSError: the connection failed, or nothing came in time.
    """
    line = lines.readline(longest + 1)
    if not line.endswith(b"\n"):
        if len(line) > longest:
            raise JsonError(f"a message is longer than {longest:,} bytes")
        return None
    kind = parse_json(line, Message, "a message", max_bytes=longest + 1)["kind"]
    if kind not in schemas:
        raise JsonError(f"a message of the kind {kind[:40]!r} is none of {', '.join(schemas)}")
    return parse_json(line, schemas[kind], f"a message of the kind {kind!r}", max_bytes=longest + 1)


def send(connection: socket.socket, message: dict) -> None:
    """Send a message; a neighbour that is gone is noticed by who reads from it."""
    line = json.dumps(message, ensure_ascii=False).encode(errors="replace") + b"\n"
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(line)


def keep_alive(connection: socket.socket) -> None:
    """Let the connection be silent as long as the neighbour's machine is there."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if option := vars(socket).get(name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def has_room(connection: socket.socket) -> bool:
    """Return whether a short message would go out at once; ValueError where it is closed."""
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(0))
