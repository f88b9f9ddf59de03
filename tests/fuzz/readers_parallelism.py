# SPDX-License-Identifier: Apache-2.0
"""Readers of parallelism/ to fuzz: both ends of the hub's connections, before and after the proof, and metadata."""

import contextlib
import dataclasses
import json
import os
import socket
import threading
from unittest import mock

from cluster import door, maintenance, messages, metadata, secret
from cluster.addresses import listen
from cluster.blame import Heartbeat
from cluster.hub import Hub, RunError
from cluster.secret import FROM_METADATA, VARIABLE, RunSecret, Secret
from files.json_reader import JsonError
from tests.fuzz.harness import reader

KNOWN = Secret(VARIABLE, b"known to the processes of the run alone")
NONCES = bytes(64)  # of both ends, when the random numbers are zeros
NO_NONCES = mock.patch.object(door.secrets, "token_bytes", bytes)
GREETING = door.MAGIC + bytes([0]) + NONCES[:32]
PROOFS = {role: door._proof(KNOWN, role, NONCES) for role in (b"process", b"hub")}


class Refusal(Exception):
    """What was read is refused, in a line."""

    exit_status = 1


@contextlib.contextmanager
def says(content: bytes):
    """Give one end of a connection whose other end says the content, hangs up, and hears what is said to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()

    def talk() -> None:
        with far, contextlib.suppress(OSError):
            far.sendall(content)
            far.shutdown(socket.SHUT_WR)
            while far.recv(1 << 16):
                pass

    thread = threading.Thread(target=talk, daemon=True)
    thread.start()
    with near:
        yield near
    thread.join()


def lines(*said: dict) -> bytes:
    return b"".join(json.dumps(message).encode() + b"\n" for message in said)


JOIN = {"kind": "join", "index": 0, "count": 2, "host": "here"}
HEARTBEAT = dataclasses.asdict(Heartbeat(0, "here", "step", 7, 30, 3.0, {"step": 1.5, "data": 0.5}))
TO_HUB = lines(
    JOIN,
    {"kind": "value", "topic": "their code 1", "value": {"train.py": "abc", "a": [1, None, 0.5]}},
    {"kind": "stop", "passed": 3}, {"kind": "promise", "boundary": 5, "passed": 4},
    {"kind": "heartbeat", "heartbeat": HEARTBEAT},
    {"kind": "blame", "allowed": 30.0}, {"kind": "heartbeat", "heartbeat": None}, {"kind": "leave"},
)  # fmt: skip
FROM_HUB = lines(
    {"kind": "joined", "hosts": ["here", "there"]}, {"kind": "values", "topic": "code 1", "values": [1, {"a": 2}]},
    {"kind": "propose", "boundary": 5}, {"kind": "stop", "boundary": 5}, {"kind": "blame", "text": "process 1"},
    {"kind": "end", "line": "process 1 died", "status": 1},
)  # fmt: skip


@reader("a stranger at the hub", lambda: [bytes(32) + PROOFS[b"process"] + lines(JOIN)])
def come_to_the_door(content: bytes, folder) -> None:
    with says(content) as connection, NO_NONCES:
        try:
            proof = door._examined(connection, KNOWN)
        except OSError as error:
            raise Refusal(str(error)) from None
        if not proof:
            raise Refusal("it does not know the secret")
    assert content[:64] == bytes(32) + PROOFS[b"process"]


@reader("a process of the run, for the hub", lambda: [TO_HUB])
def talk_to_the_hub(content: bytes, folder) -> None:
    hub = Hub(listen("127.0.0.1", 0), 2, 60, KNOWN)
    try:
        with says(content) as connection:
            hub._serve(connection)
        assert set(hub.hosts) <= {0, 1}
        assert all(isinstance(beat, Heartbeat | None) for beat, _ in hub.last_heartbeats.values())
        hub.heartbeats()
        if hub.end:
            raise RunError(hub.end["line"])
        if not hub.hosts:
            raise Refusal("it did not say who it is")
    finally:
        hub.door.close()
        hub.timer.cancel()


@reader("a hub, for a process", lambda: [GREETING + PROOFS[b"hub"] + FROM_HUB])
def listen_to_the_hub(content: bytes, folder) -> None:
    with says(content) as connection, NO_NONCES:
        try:
            door.prove(connection, lambda: KNOWN)
            assert content[: len(GREETING) + 32] == GREETING + PROOFS[b"hub"] or content[12] != GREETING[12]
            with connection.makefile("rb") as said:
                while message := messages.read(said, messages.FROM_HUB):
                    assert messages.FROM_HUB[message["kind"]].__required_keys__ <= message.keys()
        except JsonError:
            raise
        except OSError as error:
            raise Refusal(str(error)) from None


def answers() -> list[bytes]:
    """Return what a metadata server says of the secret, and of maintenance."""
    head = b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\nETag: 1a2b\r\nContent-Length: "
    values = (b"0123456789abcdef" * 4, b"TERMINATE_ON_HOST_MAINTENANCE")
    return [head + str(len(value)).encode() + b"\r\n\r\n" + value for value in values]


class Once(threading.Event):
    """An event that waiting for sets."""

    def wait(self, timeout=None):
        self.set()


@reader("metadata of Compute Engine", answers)
def ask_for_metadata(content: bytes, folder) -> None:
    told = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_answer_twice, args=[server, content], daemon=True)
        thread.start()
        host = f"127.0.0.1:{server.getsockname()[1]}"
        with (
            mock.patch.dict(os.environ, {"GCE_METADATA_HOST": host}),
            mock.patch.object(secret, "METADATA_TRIES", 1),
        ):
            maintenance._watch(host, "maintenance-event", told.append, Once())
            found = RunSecret({}, None, first=False).find()
        thread.join()
    assert not told or b"TERMINATE_ON_HOST_MAINTENANCE" in content
    if found.source != FROM_METADATA:
        raise Refusal("there is no secret")
    assert secret.FEWEST_CHARACTERS <= len(found.value) <= metadata.LONGEST_VALUE


def _answer_twice(server: socket.socket, content: bytes) -> None:
    for _ in range(2):
        with contextlib.suppress(OSError), server.accept()[0] as connection:
            connection.recv(1 << 16)
            connection.sendall(content)
