# SPDX-License-Identifier: Apache-2.0
"""What strangers do to the port of a run's hub: each attack is one connection to it."""

import concurrent.futures
import contextlib
import json
import random
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from cluster.door import ANSWER_BYTES, GREETING_BYTES, NONCE_BYTES
from tests import groups

CONNECT_SECONDS = 20.0  # which a busy machine may take
IDLE_SECONDS = 0.5
SIDE_BY_SIDE = 100  # more than the hub lets wait at its door
Attack = Callable[[socket.socket], object]


def says(*messages: bytes | dict) -> Attack:
    """Return the attack that sends lines, and hangs up."""
    lines = [message if isinstance(message, bytes) else json.dumps(message).encode() for message in messages]
    return lambda connection: connection.sendall(b"".join(line + b"\n" for line in lines))


def joins(index: int, count: int, **more) -> dict:
    return {"kind": "join", "index": index, "count": count, "host": "stranger", **more}


def fill(connection: socket.socket) -> None:
    """Send a long line without an end."""
    for _ in range(64):
        connection.sendall(b"x" * (1 << 16))


def idle(connection: socket.socket) -> None:
    """Say nothing, for some time, or until the other end hangs up."""
    connection.settimeout(IDLE_SECONDS)
    connection.recv(GREETING_BYTES)
    connection.recv(1)


def trickle(connection: socket.socket) -> None:
    """Send an answer of the right length byte by byte."""
    for byte in secrets.token_bytes(ANSWER_BYTES):
        connection.sendall(bytes([byte]))
        time.sleep(0.001)


def guess(connection: socket.socket) -> None:
    """Answer the greeting with a wrong proof, and continue as if it were right."""
    connection.recv(GREETING_BYTES)
    connection.sendall(secrets.token_bytes(ANSWER_BYTES))
    says(joins(1, 2), {"kind": "failed", "line": "all is lost", "status": 2})(connection)


def mirror(connection: socket.socket) -> None:
    """Answer with what the hub itself has sent."""
    greeting = connection.recv(GREETING_BYTES)
    connection.sendall((greeting[-NONCE_BYTES:] * 2)[:ANSWER_BYTES])


def reset(connection: socket.socket) -> None:
    """Reset the connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


ATTACKS: dict[str, Attack] = {
    "deeply nested JSON": says(b"[" * 100_000),
    "deeply nested JSON in a message": says(b'{"kind": "join", "index": ' + b"[" * 100_000),
    "a join without a host": says({"kind": "join", "index": 1, "count": 2}),
    "a second process with the same number": says(joins(1, 2)),
    "another count": says(joins(1, 9)),
    "a number out of range": says(joins(7, 2)),
    "a negative number": says(joins(-1, 2)),
    "a failure without a join": says({"kind": "failed", "line": "all is lost", "status": 2}),
    "a stop without a join": says({"kind": "stop", "passed": 0}, {"kind": "leave"}),
    "what is not a number": says(b'{"kind": "join", "index": "1", "count": 1e999, "host": null}'),
    "what is not a text": lambda connection: connection.sendall(secrets.token_bytes(500)),
    "a web browser": says(b"GET / HTTP/1.1\r\nHost: stranger\r\n\r"),
    "an endless line": fill,
    "silence": idle,
    "a trickle": trickle,
    "a wrong proof": guess,
    "the greeting as an answer": mirror,
    "nothing, and a reset": reset,
}


def strike(port: int, attack: Attack) -> None:
    """Make one attack; it ends when the hub closes the connection."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=CONNECT_SECONDS)
    with connection, contextlib.suppress(ConnectionError, TimeoutError):
        attack(connection)


def attacks(number: int, seed: int = 0) -> Iterator[Attack]:
    """Yield attacks of all kinds in an order that depends on the seed; silence, which takes time, is rare."""
    rng, quick = random.Random(seed), [attack for attack in ATTACKS.values() if attack is not idle]
    for n in range(number):
        yield idle if n % 100 == 0 else quick[n % len(quick)] if n < len(quick) else rng.choice(quick)


def strike_all(port: int, chosen: Iterable[Attack]) -> int:
    """Make attacks, many side by side; return how many."""
    with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return sum(1 for _ in pool.map(lambda attack: strike(port, attack), chosen))


class Siege(threading.Thread):
    """Makes `number` attacks on the hub at a port, as soon as the hub listens."""

    def __init__(self, port: int, number: int, seed: int = 0):
        """Begin."""
        super().__init__(daemon=True)
        self.port, self.number, self.made, self.seed = port, number, 0, seed
        self.addresses: set[str] = set()
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + groups.SECONDS
        while not self.addresses and time.monotonic() < deadline:  # before this, a connection could be to itself
            time.sleep(0.01)
            self.addresses = groups.listening(self.port)
        began = time.monotonic()
        self.made = strike_all(self.port, attacks(self.number, self.seed))
        self.seconds = time.monotonic() - began
