# SPDX-License-Identifier: Apache-2.0
"""The connection of a process to the hub in process 0: it exchanges values and reports the end of other processes."""

import collections
import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable

from cluster import messages
from cluster.door import PROOF_SECONDS, Refused, prove
from cluster.hub import LEAVE_SECONDS, LEAVING, RunError
from cluster.messages import has_room, keep_alive, send
from cluster.secret import Secret
from files.json_reader import JsonError

RETRY_SECONDS, REFUSED_SECONDS = 0.2, 1.0  # between two attempts to reach the hub


class Line:
    """A process's connection to the hub.

    All processes of a run must stop after the same step; otherwise those that continue wait for the others for ever.
    So each process counts the boundaries that it passes, of steps and of evaluated batches. The counts mean the same in
    all processes. The lines agree on the boundary to stop at in their own threads, because the main thread of a process
    may be blocked in a collective.

    Attributes:
      hosts: the host name of each process.
    """

    def __init__(
        self, host: str, port: int, *, index: int, count: int, join_seconds: float, on_end: Callable,
        find_secret: Callable[[], Secret],
    ):  # fmt: skip
        """Connect to the hub; RunError if no hub that knows the run's secret answers within `join_seconds`.

        Args:
          on_end: called with a line and an exit status, in a thread, when a process has died or failed; it does not
            return.
          find_secret: called for each attempt to reach the hub, since process 0 may not have written the secret yet.
        """
        self.index, self.count = index, count
        self.passed, self.promised, self.stop_at = 0, math.inf, math.inf  # boundaries
        self.holding = False  # whether to wait at the next boundary until the stop is agreed
        self.changed, self.rounds = threading.Condition(), collections.Counter()
        self.values: dict[str, list] = {}
        self.hosts: list[str] = []
        self.to_blame: str | None = None
        self.sending, self.stop_asked = threading.Lock(), False
        self.on_end, self.leaving = on_end, False
        self.address, self.join_seconds = f"{host}:{port}", join_seconds
        self.deadline = time.monotonic() + join_seconds
        self.connection = _reach(host, port, find_secret, self.deadline, join_seconds)
        keep_alive(self.connection)
        self._say(kind="join", index=index, count=count, host=socket.gethostname())
        threading.Thread(target=self._listen, daemon=True).start()

    def join(self) -> None:
        """Wait until all processes have joined. The hub reports a late one to all; RunError if the hub is silent."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.hosts, self.deadline - time.monotonic() + LEAVE_SECONDS):
                raise RunError(f"process 0 at {self.address} did not answer within {self.join_seconds:g} s")

    def gather(self, topic: str, value) -> list:
        """Return the values of all processes, in rank order; every process must gather the same topics."""
        with self.changed:
            self.rounds[topic] += 1
            topic = f"{topic} {self.rounds[topic]}"
        self._say(kind="value", topic=topic, value=value)  # without the lock, which `_hear` needs meanwhile
        with self.changed:
            self.changed.wait_for(lambda: topic in self.values)
            return self.values.pop(topic)

    def ask_to_stop(self, hold: bool = False) -> None:
        """Ask all processes to stop at a boundary soon; safe in a signal handler whose thread is sending a message.

        With `hold`, this process passes no boundary until the stop is agreed, at most BOUNDARIES_TO_STOP away.
        """
        self.holding, self.stop_asked = self.holding or hold, True
        self._say_stop()

    def boundary(self) -> bool:
        """Pass a boundary; return whether all processes stop here."""
        with self.changed:
            self.passed += 1
            self.changed.wait_for(lambda: (self.passed < self.promised and not self.holding) or self.stop_at < math.inf)
            return self.passed >= self.stop_at

    def send_heartbeat(self, heartbeat: dict | None) -> None:
        """Send a heartbeat, given as a dict of its fields; None ends the heartbeats. Never wait for the hub."""
        self._say_at_once(kind="heartbeat", heartbeat=heartbeat)

    def blame(self, seconds: float, allowed: float = 0.0) -> str | None:
        """Describe the process that blocks the run; None if the hub does not answer within `seconds`.

        Returns "" if the process that is furthest behind made progress within the last `allowed` seconds.
        """
        with self.changed:
            self.to_blame = None
            self._say_at_once(kind="blame", allowed=allowed)
            self.changed.wait_for(lambda: self.to_blame is not None, seconds)
            return self.to_blame

    def fail(self, line: str, status: int) -> None:
        """Report why this process ends; the other processes end too."""
        if self.sending.acquire(timeout=LEAVE_SECONDS):  # fails if this very thread was sending
            with contextlib.suppress(OSError):  # no process is left to notify
                send(self.connection, {"kind": "failed", "line": line, "status": status})
            self.sending.release()

    def leave(self) -> None:
        """Leave the group without an error, when all processes are done."""
        self.gather(LEAVING, None)
        self.leaving = True
        self._say(kind="leave")

    def _say(self, **message) -> None:
        with self.sending:
            send(self.connection, message)
        self._say_stop()

    def _say_stop(self) -> None:
        """Send a pending stop request, unless a message is being sent: its sender then sends the request."""
        while self.stop_asked and self.sending.acquire(blocking=False):
            try:
                if self.stop_asked:
                    self.stop_asked = False
                    send(self.connection, {"kind": "stop", "passed": self.passed})
            finally:
                self.sending.release()

    def _say_at_once(self, **message) -> None:
        """Send a short message, or drop it if sending would block, as when the hub is frozen and no longer reads."""
        if not self.sending.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(OSError, ValueError):  # closed, which `_listen` reports
                if has_room(self.connection):
                    send(self.connection, message)
        finally:
            self.sending.release()
        self._say_stop()

    def _listen(self) -> None:
        why = "died"
        with contextlib.suppress(OSError, ValueError), self.connection.makefile("rb") as lines:
            try:
                while message := messages.read(lines, messages.FROM_HUB, self.count * messages.LONGEST_MESSAGE):
                    self._hear(message)
            except JsonError as error:
                why = f"sent an invalid message: {error}"
        self.connection.close()
        if not self.leaving:
            self.on_end(f"process 0 of {self.count} ({self.hosts[0] if self.hosts else 'the coordinator'}) {why}", 1)

    def _hear(self, message: dict) -> None:
        if message["kind"] == "end":
            self.on_end(message["line"], message["status"])
        with self.changed:
            match message["kind"]:
                case "joined":
                    self.hosts = message["hosts"]
                case "values":
                    self.values[message["topic"]] = message["values"]
                case "propose":
                    self.promised = message["boundary"]
                    self._say(kind="promise", boundary=self.promised, passed=self.passed)
                case "stop":
                    self.stop_at = message["boundary"]
                case "blame":
                    self.to_blame = message["text"]
            self.changed.notify_all()


def _reach(host: str, port: int, find_secret: Callable[[], Secret], deadline: float, seconds: float) -> socket.socket:
    """Return a connection to the hub after mutual authentication with the secret of the run.

    A listener that does not know the secret may be a stranger, or the hub of an earlier start that has not ended yet.
    So the process tries again, until RunError at the deadline.
    """
    while True:
        try:
            return _connect(host, port, find_secret, deadline)
        except OSError as error:
            reason = error.strerror or error
            pause = REFUSED_SECONDS if isinstance(error, Refused) else RETRY_SECONDS
        if time.monotonic() + pause > deadline:
            raise RunError(f"process 0 could not be reached at {host}:{port} within {seconds:g} s ({reason})")
        time.sleep(pause)


def _connect(host: str, port: int, find_secret: Callable[[], Secret], deadline: float) -> socket.socket:
    seconds = max(RETRY_SECONDS, deadline - time.monotonic())
    connection = socket.create_connection((host, port), timeout=seconds)
    try:
        if connection.getsockname() == connection.getpeername():
            # No process listens yet, and the kernel chose the target port for this end: TCP connected it to itself.
            raise ConnectionError("no process listens there")
        prove(connection, find_secret, min(seconds, PROOF_SECONDS))
    except OSError:
        connection.close()
        raise
    return connection
