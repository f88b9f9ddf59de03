# SPDX-License-Identifier: Apache-2.0
"""A line between the processes of a run that works when the devices do not: who is up, who died, what all agree on.

Process 0 holds the hub; every process, 0 too, has a line to it. The messages are JSON, one to a text line. It knows
nothing of jax: the collectives of the devices wait for ever, or abort, when a process is missing; this names it.
"""

import collections
import contextlib
import dataclasses
import json
import math
import select
import socket
import threading
import time
from collections.abc import Callable

from parallelism.blame import Sign, to_blame

RETRY_SECONDS = 0.2
LEAD = 2  # boundaries from the furthest process to where all are proposed to stop
# That a process passes at most from where it asks for a stop, and holds, to where all stop: others may be one further.
BOUNDARIES_TO_STOP = LEAD + 3
LEAVE_SECONDS = 10.0
# The kernel asks a silent neighbour for a sign of life, whatever Python is busy with: a lost machine shows in 20 s.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}


class RunError(RuntimeError):
    """What ends a run and is no mistake of its user's; the message names the process, the device or the disk."""

    exit_status = 1


class Hub:
    """The middle, in process 0: passes values round, and tells everybody when one is gone."""

    def __init__(self, host: str, port: int, count: int, join_seconds: float):
        """Listen on `port`, RunError where it is taken; `count` processes now have `join_seconds` to come."""
        self.count, self.changed = count, threading.Condition()
        self.connections: dict[int, socket.socket] = {}
        self.hosts: dict[int, str] = {}
        self.left: set[int] = set()
        self.values: dict[str, dict[int, object]] = collections.defaultdict(dict)
        self.end: dict | None = None
        self.proposal, self.promises, self.blamed = None, {}, ""
        self.said: dict[int, tuple[dict | None, float]] = {}  # the last sign, and when; None: no more
        self.listener = _listen(host, port)
        threading.Thread(target=self._accept, daemon=True).start()
        self.timer = threading.Timer(join_seconds, self._check_all_came, [join_seconds])
        self.timer.daemon = True
        self.timer.start()

    def signs(self) -> list[Sign]:
        """Return the last sign of every process that is here and has not ended its watch, by number."""
        with self.changed:
            waiting = {index for given in self.values.values() for index in given}
            here = [(index, *said) for index, said in sorted(self.said.items()) if index not in self.left and said[0]]
            now = time.monotonic()
            return [Sign(**(sign | {"age": now - since, "waits": n in waiting})) for n, sign, since in here]

    def settle(self, seconds: float) -> None:
        """Return when all have been told why the run ends, or after some seconds; before process 0 ends itself."""
        with self.changed:
            self.changed.wait_for(lambda: self.end, seconds)

    def close(self, seconds: float = LEAVE_SECONDS) -> None:
        """Go when every process has said goodbye, or after some seconds."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.left) == self.count, seconds)
        self.listener.close()
        self.timer.cancel()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        index = None
        with contextlib.suppress(OSError, ValueError):  # a line that breaks off is a death, told below
            _keep_alive(connection)
            for text in connection.makefile():
                message = json.loads(text)
                if index is None:
                    index = _number_of_joining(message)
                with self.changed:
                    self._take(index, message, connection)
                    self.changed.notify_all()
        with self.changed:
            if index is not None and index not in self.left and self.connections.get(index) is connection:
                self._end(f"process {index} of {self.count} ({self.hosts[index]}) died", 1)
            self.left |= {index} - {None}
            self.changed.notify_all()
        connection.close()

    def _take(self, index: int, message: dict, connection: socket.socket) -> None:
        match message["kind"]:
            case "join":
                self._join(index, message, connection)
            case "value":
                self._collect(index, message)
            case "stop" if self.proposal is None:
                self._propose(message["passed"] + LEAD)
            case "promise" if message["boundary"] == self.proposal:
                self._promised(index, message["passed"])
            case "sign":
                self.said[index] = (message["sign"], time.monotonic())
            case "blame":
                found = to_blame(self.signs())
                if found.idle > message["allowed"]:
                    self.blamed = self.blamed or found.text  # for all: who is to blame may end first
                _send(connection, {"kind": "blame", "text": self.blamed})
            case "failed":
                self.left.add(index)  # it says so itself
                line = (
                    f"process {index} of {self.count} ({self.hosts[index]}): {message['line'].removeprefix('error: ')}"
                )
                self._end(line, message["status"])
            case "leave":
                self.left.add(index)

    def _join(self, index: int, message: dict, connection: socket.socket) -> None:
        host = message["host"]
        if index in self.connections:
            self._end(f"two processes are number {index}: on {self.hosts[index]} and on {host}", 2, also=connection)
            return
        self.connections[index], self.hosts[index] = connection, host
        self.said[index] = (dataclasses.asdict(Sign(index, host, "start_up", 0, 0, 0.0, {})), time.monotonic())
        if message["count"] != self.count:
            says = f"process {index} ({host}) was told of {message['count']} processes, process 0 of {self.count}"
            self._end(f"{says}; give all the same number", 2)
        elif self.end:
            _send(connection, self.end)
        elif len(self.connections) == self.count:
            self._tell({"kind": "joined", "hosts": [self.hosts[i] for i in range(self.count)]})

    def _collect(self, index: int, message: dict) -> None:
        topic = message["topic"]
        self.values[topic][index] = message["value"]
        if len(self.values[topic]) == self.count:
            values = self.values.pop(topic)
            self._tell({"kind": "values", "topic": topic, "values": [values[i] for i in range(self.count)]})

    def _propose(self, boundary: int) -> None:
        """Ask all to wait at a boundary until all have promised to; one that has passed it makes it a later one."""
        self.proposal, self.promises = boundary, {}
        self._tell({"kind": "propose", "boundary": boundary})

    def _promised(self, index: int, passed: int) -> None:
        self.promises[index] = passed
        furthest = max(self.promises.values())
        if len(self.promises) == self.count and furthest >= self.proposal:
            self._propose(furthest + LEAD)
        elif len(self.promises) == self.count:
            self._tell({"kind": "stop", "boundary": self.proposal})

    def _check_all_came(self, seconds: float) -> None:
        with self.changed:
            missing = [str(i) for i in range(self.count) if i not in self.connections]
            if missing:
                came = ", ".join(f"{i} on {host}" for i, host in sorted(self.hosts.items()))
                which = f"process {', '.join(missing)} of {self.count}"
                self._end(f"{which} did not come up within {seconds:g} s (there are: {came})", 1)

    def _end(self, line: str, status: int, also: socket.socket | None = None) -> None:
        if self.end is None:  # the first cause; what follows from it is not told
            self.end = {"kind": "end", "line": line, "status": status}
            self._tell(self.end)
        if also:
            _send(also, self.end)

    def _tell(self, message: dict) -> None:
        for index, connection in self.connections.items():
            if index not in self.left:
                _send(connection, message)


class Line:
    """A process's connection to the hub.

    Processes of a run must stop after the same step, or those that go on wait for the others for ever. So each counts
    the boundaries that it passes, of steps and of evaluated batches, the same in all. A boundary at which all stop is
    agreed on between the lines, in threads of their own: a process may be in a collective that waits for another.

    Attributes:
      hosts: name of the machine of each process.
    """

    def __init__(self, host: str, port: int, *, index: int, count: int, join_seconds: float, on_end: Callable):
        """Reach the hub; RunError where there was none within `join_seconds`.

        `on_end` is given a line and an exit status, in a thread, when a process has died or failed; it does not return.
        """
        self.index, self.count = index, count
        self.passed, self.promised, self.stop_at = 0, math.inf, math.inf  # boundaries
        self.holding = False  # at the next of them, until it is known where all stop
        self.changed, self.rounds = threading.Condition(), collections.Counter()
        self.values: dict[str, list] = {}
        self.hosts: list[str] = []
        self.to_blame: str | None = None
        self.sending, self.stop_asked = threading.Lock(), False
        self.on_end, self.leaving = on_end, False
        self.address, self.join_seconds = f"{host}:{port}", join_seconds
        self.deadline = time.monotonic() + join_seconds
        self.connection = _connect(host, port, self.deadline, join_seconds)
        _keep_alive(self.connection)
        self._say(kind="join", index=index, count=count, host=socket.gethostname())
        threading.Thread(target=self._listen, daemon=True).start()

    def join(self) -> None:
        """Wait for the others; who is late the hub tells all. Raises RunError where it says nothing."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.hosts, self.deadline - time.monotonic() + LEAVE_SECONDS):
                raise RunError(f"process 0 at {self.address} did not answer within {self.join_seconds:g} s")

    def gather(self, topic: str, value) -> list:
        """Return the values of all processes, by number; every process must ask for the same topics."""
        with self.changed:
            self.rounds[topic] += 1
            topic = f"{topic} {self.rounds[topic]}"
        self._say(kind="value", topic=topic, value=value)  # not in the lock, which hearing the hub needs meanwhile
        with self.changed:
            self.changed.wait_for(lambda: topic in self.values)
            return self.values.pop(topic)

    def ask_to_stop(self, hold: bool = False) -> None:
        """Have all processes stop at a boundary soon; from a signal's handler too, whose thread may be speaking.

        To `hold` is to pass no boundary before it is known where: it is then BOUNDARIES_TO_STOP away at most.
        """
        self.holding, self.stop_asked = self.holding or hold, True
        self._say_stop()

    def boundary(self) -> bool:
        """Pass a boundary; return whether all processes stop here."""
        with self.changed:
            self.passed += 1
            self.changed.wait_for(lambda: (self.passed < self.promised and not self.holding) or self.stop_at < math.inf)
            return self.passed >= self.stop_at

    def sign(self, sign: dict | None) -> None:
        """Give a sign of life, the fields of a Sign; None: the last one. Never waits for the hub."""
        self._say_at_once(kind="sign", sign=sign)

    def blame(self, seconds: float, allowed: float = 0.0) -> str | None:
        """Return who is to blame that nothing ends, in words; None where the hub does not answer within `seconds`.

        It is "" where who is furthest behind got on within the seconds that are `allowed`.
        """
        with self.changed:
            self.to_blame = None
            self._say_at_once(kind="blame", allowed=allowed)
            self.changed.wait_for(lambda: self.to_blame is not None, seconds)
            return self.to_blame

    def fail(self, line: str, status: int) -> None:
        """Say why this process ends; the others end too."""
        if self.sending.acquire(timeout=LEAVE_SECONDS):  # not where this very thread was speaking
            with contextlib.suppress(OSError):  # nobody is left to be told
                _send(self.connection, {"kind": "failed", "line": line, "status": status})
            self.sending.release()

    def leave(self) -> None:
        """Part in peace, once all are done."""
        self.gather("leave", None)
        self.leaving = True
        self._say(kind="leave")

    def _say(self, **message) -> None:
        with self.sending:
            _send(self.connection, message)
        self._say_stop()

    def _say_stop(self) -> None:
        """Say that a stop is asked for, unless a message is on its way: whoever sends that one says it after it."""
        while self.stop_asked and self.sending.acquire(blocking=False):
            try:
                if self.stop_asked:
                    self.stop_asked = False
                    _send(self.connection, {"kind": "stop", "passed": self.passed})
            finally:
                self.sending.release()

    def _say_at_once(self, **message) -> None:
        """Say what is short, or nothing where that would have to wait: for a hub that is frozen and reads no more."""
        if not self.sending.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(OSError, ValueError):  # closed, which `_listen` tells
                if _has_room(self.connection):
                    _send(self.connection, message)
        finally:
            self.sending.release()
        self._say_stop()

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for text in self.connection.makefile():
                self._hear(json.loads(text))
        self.connection.close()
        if not self.leaving:
            self.on_end(f"process 0 of {self.count} ({self.hosts[0] if self.hosts else 'the coordinator'}) died", 1)

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


def _number_of_joining(message) -> int:
    """Return the number of a process that joins; ValueError for what a stranger sends to the port."""
    if not isinstance(message, dict) or message.get("kind") != "join" or not isinstance(message.get("index"), int):
        raise ValueError("not from a process of a run")
    return message["index"]


def check_free(host: str, port: int) -> None:
    """Raise RunError where another program listens on a port of this machine."""
    _listen(host, port).close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        if host in ("localhost", "127.0.0.1"):
            return socket.create_server((host, port))
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise RunError(f"port {port} on this machine: {error.strerror}; take another coordinator port") from None


def _connect(host: str, port: int, deadline: float, seconds: float) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=max(RETRY_SECONDS, deadline - time.monotonic()))
            if connection.getsockname() != connection.getpeername():
                return connection
            # Nobody listens yet, and the kernel gave this end the port that it asks for: TCP connects it to itself.
            connection.close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(
                    f"process 0 did not come up at {host}:{port} within {seconds:g} s ({error.strerror or error})"
                ) from None
            time.sleep(RETRY_SECONDS)


def _keep_alive(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if option := vars(socket).get(name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _has_room(connection: socket.socket) -> bool:
    """Return whether a short message would go out at once; ValueError where it is closed."""
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(0))


def _send(connection: socket.socket, message: dict) -> None:
    """Send a message; a neighbour that is gone is noticed by who reads from it."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(json.dumps(message).encode() + b"\n")
