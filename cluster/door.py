# SPDX-License-Identifier: Apache-2.0
"""Mutual authentication of the hub and the processes of a run: each side proves that it knows the run's secret.

Each side draws a random nonce for each connection and answers with an HMAC over both nonces. So the secret is never
sent, and a recorded answer cannot be replayed. Every message has a fixed length: nothing that a peer sends is parsed
before it is authenticated.
"""

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable

from cluster.secret import FROM_FOLDER, SOURCES, Secret

MAGIC = b"torus hub 1\n"
NONCE_BYTES, PROOF_BYTES = 32, 32
GREETING_BYTES = len(MAGIC) + 1 + NONCE_BYTES  # the one byte is the number of the hub's source of the secret
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
PROOF_SECONDS = 10.0  # the time limit for the handshake
MOST_STRANGERS = 64  # handshakes in progress at once; one more closes the oldest
PAUSE_SECONDS = 0.2  # after a failed accept, for example in a process without free file descriptors


class Refused(ConnectionError):
    """The other end did not prove that it knows this process's secret."""


class Door:
    """Accepts connections, serves those that know the secret, and closes and counts all others."""

    def __init__(self, listener: socket.socket, secret: Secret, serve: Callable[[socket.socket], None]):
        """Start to accept; `serve` is called with each authenticated connection, in its own thread."""
        self.listener, self.secret, self.serve = listener, secret, serve
        self.lock, self.over = threading.Lock(), threading.Event()
        self.waiting: dict[socket.socket, None] = {}  # handshakes in progress, the oldest first
        self.refused, self.first_refused, self.reported = 0, "", 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.over.set()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self.listener.close()

    def report(self) -> str:
        """Return a line about the connections that were refused; "" if there are none since the last report."""
        with self.lock:
            new, self.reported = self.refused - self.reported, self.refused
            return f"closed {self.strangers()}" if new else ""

    def strangers(self) -> str:
        """Return the number of refused connections, in words."""
        number = f"{self.refused:,} connection" + "s" * (self.refused != 1)
        return f"{number} that did not know the secret of the run (the first from {self.first_refused})"

    def _accept(self) -> None:
        while not self.over.is_set():
            try:
                connection, address = self.listener.accept()
            except OSError:
                self.over.wait(PAUSE_SECONDS)
            else:
                self._begin(connection, address[0])

    def _begin(self, connection: socket.socket, address: str) -> None:
        """Examine a connection in its own thread; if too many are being examined, close the oldest of them."""
        with self.lock:
            if len(self.waiting) == MOST_STRANGERS:
                oldest = next(iter(self.waiting))
                del self.waiting[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread fails the handshake and closes it
            self.waiting[connection] = None
        try:
            threading.Thread(target=self._examine, args=[connection, address], daemon=True).start()
        except RuntimeError:  # no more threads can be started
            self._refuse(connection, address)

    def _examine(self, connection: socket.socket, address: str) -> None:
        """Authenticate a connection and serve it, or close and count it."""
        proof = b""
        with contextlib.suppress(OSError):  # the peer closed the connection or timed out
            proof = _examined(connection, self.secret)
        with self.lock:
            still_waits = self.waiting.pop(connection, False) is None
        if not (proof and still_waits):
            self._refuse(connection, address)
            return
        with connection, contextlib.suppress(OSError):  # the peer has closed the connection since
            connection.settimeout(PROOF_SECONDS)
            connection.sendall(proof)
            self.serve(connection)

    def _refuse(self, connection: socket.socket, address: str) -> None:
        with connection, self.lock:
            self.waiting.pop(connection, None)
            self.refused += 1
            self.first_refused = self.first_refused or address


def _examined(connection: socket.socket, secret: Secret) -> bytes:
    """Return the hub's proof for the peer, or b"" if the peer does not know the secret.

    Raises OSError if the peer closes the connection or does not answer within PROOF_SECONDS.
    """
    deadline, nonce = time.monotonic() + PROOF_SECONDS, secrets.token_bytes(NONCE_BYTES)
    connection.settimeout(PROOF_SECONDS)
    connection.sendall(MAGIC + bytes([SOURCES.index(secret.source)]) + nonce)
    answer = _receive(connection, ANSWER_BYTES, deadline)
    nonces, proof = nonce + answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    knows = hmac.compare_digest(proof, _proof(secret, b"process", nonces))
    return _proof(secret, b"hub", nonces) if knows else b""


def prove(connection: socket.socket, find_secret: Callable[[], Secret], seconds: float = PROOF_SECONDS) -> None:
    """Prove to the hub that this process knows the secret, and check the hub's proof.

    The secret is looked up after the hub's greeting, because process 0 may write it just before.

    Raises:
      Refused: the peer does not know the secret, or is not a hub.
      OSError: the peer closes the connection before its greeting, or sends none within `seconds`.
    """
    deadline, nonce = time.monotonic() + seconds, secrets.token_bytes(NONCE_BYTES)
    greeting = _receive(connection, GREETING_BYTES, deadline)
    if not greeting.startswith(MAGIC):
        raise Refused("the program that listens there is not a process of a run")
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
    """Return the reason why the hub's secret differs; `source` is the index in SOURCES of the hub's own source."""
    theirs = SOURCES[source] if source < len(SOURCES) else "an unknown source"
    in_folder = theirs == secret.source == FROM_FOLDER
    remedy = "let all processes see the same folder" if in_folder else "give all processes the same secret"
    return f"the hub has the secret of the run from {theirs}, this process from {secret.source}; they differ; {remedy}"


def _proof(secret: Secret, role: bytes, nonces: bytes) -> bytes:
    """Return the HMAC for a role; only a process with the same secret from the same source can compute it."""
    return hmac.digest(secret.value, b" ".join([MAGIC, role, secret.source.encode(), nonces]), "sha256")


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Return exactly `size` bytes; OSError if they do not arrive by `deadline`, a time.monotonic()."""
    received = b""
    while len(received) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it does not answer")
        connection.settimeout(left)
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionError("it closed the connection")
        received += part
    return received
