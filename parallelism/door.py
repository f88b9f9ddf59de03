# SPDX-License-Identifier: Apache-2.0
"""The door of the hub: processes of the run and the hub prove to each other that they know the run's secret.

Each side makes up a random number for each connection and answers the other's with an HMAC of both, so that the secret
itself is never sent and no answer serves twice. All of it has a fixed length: before a stranger has proved anything,
nothing that it sends is parsed.
"""

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable

from parallelism.secret import FROM_FOLDER, SOURCES, Secret

MAGIC = b"torus hub 1\n"
NONCE_BYTES, PROOF_BYTES = 32, 32
GREETING_BYTES = len(MAGIC) + 1 + NONCE_BYTES  # the one byte is the number of the hub's source of the secret
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
PROOF_SECONDS = 10.0  # for which a stranger may stand at the door
MOST_STRANGERS = 64  # at the door at once; one more, and the oldest has to go
PAUSE_SECONDS = 0.2  # where no connection can be taken, as of a process that has no descriptor left


class Refused(ConnectionError):
    """The other end did not prove that it knows this process's secret."""


class Door:
    """Listens, lets in who knows the secret, and closes and counts all other connections."""

    def __init__(self, listener: socket.socket, secret: Secret, serve: Callable[[socket.socket], None]):
        """Begin; `serve` is given each connection that has proved itself, in a thread of its own."""
        self.listener, self.secret, self.serve = listener, secret, serve
        self.lock, self.over = threading.Lock(), threading.Event()
        self.waiting: dict[socket.socket, None] = {}  # strangers that have not proved anything yet, the oldest first
        self.refused, self.first_refused, self.reported = 0, "", 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more."""
        self.over.set()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        self.listener.close()

    def report(self) -> str:
        """Return a line about the connections that were closed, "" where there were none since the last report."""
        with self.lock:
            new, self.reported = self.refused - self.reported, self.refused
            return f"closed {self.strangers()}" if new else ""

    def strangers(self) -> str:
        """Return how many connections did not know the secret, in words."""
        number = f"{self.refused:,} connection" + "s" * (self.refused != 1)
        return f"{number} that did not know the secret of the run (the first from {self.first_refused})"

    def _accept(self) -> None:
        while not self.over.is_set():
            try:
                connection, address = self.listener.accept()
            except OSError:
                self.over.wait(PAUSE_SECONDS)
                continue
            with self.lock:
                if len(self.waiting) == MOST_STRANGERS:
                    oldest = next(iter(self.waiting))
                    del self.waiting[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread does the rest
                self.waiting[connection] = None
            try:
                threading.Thread(target=self._examine, args=[connection, address[0]], daemon=True).start()
            except RuntimeError:  # no more threads can be started
                self._refuse(connection, address[0])

    def _examine(self, connection: socket.socket, address: str) -> None:
        """Let a connection in, or close and count it."""
        proof = b""
        with contextlib.suppress(OSError):  # it hung up, or was silent for too long
            proof = _examined(connection, self.secret)
        with self.lock:
            still_waits = self.waiting.pop(connection, False) is None
        if not (proof and still_waits):
            self._refuse(connection, address)
            return
        with connection, contextlib.suppress(OSError):  # it hung up since
            connection.settimeout(PROOF_SECONDS)
            connection.sendall(proof)
            self.serve(connection)

    def _refuse(self, connection: socket.socket, address: str) -> None:
        with connection, self.lock:
            self.waiting.pop(connection, None)
            self.refused += 1
            self.first_refused = self.first_refused or address


def _examined(connection: socket.socket, secret: Secret) -> bytes:
    """Return what proves to the process at the other end that the hub knows the secret; b"" where that one does not.

    Raises OSError where it hangs up, or does not answer within PROOF_SECONDS.
    """
    deadline, nonce = time.monotonic() + PROOF_SECONDS, secrets.token_bytes(NONCE_BYTES)
    connection.settimeout(PROOF_SECONDS)
    connection.sendall(MAGIC + bytes([SOURCES.index(secret.source)]) + nonce)
    answer = _receive(connection, ANSWER_BYTES, deadline)
    nonces, proof = nonce + answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    knows = hmac.compare_digest(proof, _proof(secret, b"process", nonces))
    return _proof(secret, b"hub", nonces) if knows else b""


def prove(connection: socket.socket, find_secret: Callable[[], Secret], seconds: float = PROOF_SECONDS) -> None:
    """Prove to the hub at the other end that this process knows the secret, and have it do the same.

    The secret is looked for when the hub has answered: process 0 may write it just before.

    Raises:
      Refused: it does not know the secret, or is no hub.
      OSError: it hangs up before, or does not answer within `seconds`.
    """
    deadline, nonce = time.monotonic() + seconds, secrets.token_bytes(NONCE_BYTES)
    greeting = _receive(connection, GREETING_BYTES, deadline)
    if not greeting.startswith(MAGIC):
        raise Refused("what listens there is no process of a run")
    secret = find_secret()
    nonces = greeting[-NONCE_BYTES:] + nonce
    try:
        connection.sendall(nonce + _proof(secret, b"process", nonces))
        proof = _receive(connection, PROOF_BYTES, deadline)
    except OSError:
        proof = b""
    if not hmac.compare_digest(proof, _proof(secret, b"hub", nonces)):
        raise Refused(_why(secret, greeting[len(MAGIC)]))


def _why(secret: Secret, source: int) -> str:
    """Return why a hub may not know the secret; it says by a number where its own is from."""
    theirs = SOURCES[source] if source < len(SOURCES) else "somewhere else"
    in_folder = theirs == secret.source == FROM_FOLDER
    remedy = "let all processes see the same folder" if in_folder else "give all processes the same secret"
    return (
        f"the hub has its secret of the run from {theirs}, this process from {secret.source}, and they differ; {remedy}"
    )


def _proof(secret: Secret, role: bytes, nonces: bytes) -> bytes:
    """Return what only those can compute who know the secret, and have it from the same source."""
    return hmac.digest(secret.value, b" ".join([MAGIC, role, secret.source.encode(), nonces]), "sha256")


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Return so many bytes; OSError where they do not come by `deadline`, a time.monotonic()."""
    received = b""
    while len(received) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it says nothing")
        connection.settimeout(left)
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionError("it hung up")
        received += part
    return received
