# SPDX-License-Identifier: Apache-2.0
"""A line between the processes of a run that works when the devices do not: who is up, who died, what all agree on.

Process 0 holds the hub; every process, 0 too, has a line to it (parallelism/line.py), once it has proved that it knows
the secret of the run (parallelism/door.py). It knows nothing of jax: the collectives of the devices wait for ever, or
abort, when a process is missing; this names it.
"""

import collections
import dataclasses
import socket
import threading
import time

from files.json_reader import JsonError
from parallelism import messages
from parallelism.blame import Heartbeat, to_blame
from parallelism.door import Door
from parallelism.messages import send
from parallelism.secret import Secret

LEAD = 2  # boundaries from the furthest process to the proposed stop
# A process that asks for a stop and holds passes at most this many boundaries until all stop; others pass one more.
BOUNDARIES_TO_STOP = LEAD + 3
LEAVE_SECONDS = 10.0
LONGEST_HOST, LONGEST_REASON = 255, 1500  # characters of what a process says, in a line


class RunError(RuntimeError):
    """What ends a run and is no mistake of its user's; the message names the process, the device or the disk."""

    exit_status = 1


class Hub:
    """The middle, in process 0: passes values round, and tells everybody when one is gone."""

    def __init__(self, listener: socket.socket, count: int, join_seconds: float, secret: Secret):
        """Take the processes that come to `listener`; all `count` of them have `join_seconds` for it from now on."""
        self.count, self.changed = count, threading.Condition()
        self.connections: dict[int, socket.socket] = {}
        self.hosts: dict[int, str] = {}
        self.left: set[int] = set()
        self.values: dict[str, dict[int, object]] = collections.defaultdict(dict)
        self.end: dict | None = None
        self.proposal, self.promises, self.blamed = None, {}, ""
        self.last_heartbeats: dict[
            int, tuple[Heartbeat | None, float]
        ] = {}  # with their times; None: no more will come
        self.door = Door(listener, secret, self._serve)
        self.timer = threading.Timer(join_seconds, self._check_all_came, [join_seconds])
        self.timer.daemon = True
        self.timer.start()

    def heartbeats(self) -> list[Heartbeat]:
        """Return the last heartbeat of every process that is connected and has not ended its watch, by number."""
        with self.changed:
            waiting = {index for given in self.values.values() for index in given}
            last = sorted(self.last_heartbeats.items())
            here = [(index, beat, since) for index, (beat, since) in last if index not in self.left and beat]
            now = time.monotonic()
            return [dataclasses.replace(beat, age=now - since, waits=n in waiting) for n, beat, since in here]

    def settle(self, seconds: float) -> None:
        """Wait until all processes know why the run ends, or for some seconds, before process 0 ends."""
        with self.changed:
            self.changed.wait_for(lambda: self.end, seconds)

    def close(self, seconds: float = LEAVE_SECONDS) -> None:
        """Close when every process has left, or after some seconds."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.left) == self.count, seconds)
        self.door.close()
        self.timer.cancel()

    def _serve(self, connection: socket.socket) -> None:
        """Listen to a process, in a thread of its own, until it has nothing more to say."""
        index, why = None, "died"
        with connection.makefile("rb") as lines:
            try:
                index = self._join(lines, connection)
                while index is not None and (message := messages.read(lines, messages.TO_HUB)):
                    with self.changed:
                        self._take(index, message, connection)
                        self.changed.notify_all()
            except OSError:  # a line that breaks off is a death
                pass
            except JsonError as error:
                why = f"sent what no process of a run sends: {error}"
        with self.changed:
            if index is not None and index not in self.left:
                self._end(f"process {index} of {self.count} ({self.hosts[index]}) {why}", 1)
            self.left |= {index} - {None}
            self.changed.notify_all()

    def _join(self, lines, connection: socket.socket) -> int | None:
        """Return the number of a process that joins; None for one that cannot, after a message with the reason.

        Raises JsonError and OSError for one that does not say who it is.
        """
        message = messages.read(lines, messages.JOINING, messages.LONGEST_JOIN)
        if message is None:
            return None
        index, host = message["index"], _one_line(message["host"], LONGEST_HOST)
        with self.changed:
            if len(self.hosts) == self.count:  # the others must not suffer from a second start of the run
                line = f"process {index} ({host}) is one too many: all {self.count} processes of the run are there"
                remedy = "wait until that run has ended, or take another coordinator port"
                send(connection, {"kind": "end", "line": f"{line}; {remedy}", "status": 1})
            elif message["count"] != self.count or not 0 <= index < self.count:
                says = f"process {index} ({host}) was told of {message['count']} processes, process 0 of {self.count}"
                self._end(f"{says}; give all the same number", 2, also=connection)
            elif index in self.hosts:
                self._end(f"two processes are number {index}: on {self.hosts[index]} and on {host}", 2, also=connection)
            else:
                self._joined(index, host, connection)
                return index
        return None

    def _joined(self, index: int, host: str, connection: socket.socket) -> None:
        messages.keep_alive(connection)
        self.connections[index], self.hosts[index] = connection, host
        self.last_heartbeats[index] = (Heartbeat(index, host, "start_up", 0, 0, 0.0, {}), time.monotonic())
        if self.end:
            send(connection, self.end)
        elif len(self.hosts) == self.count:
            self._tell({"kind": "joined", "hosts": [self.hosts[i] for i in range(self.count)]})

    def _take(self, index: int, message: dict, connection: socket.socket) -> None:
        match message["kind"]:
            case "value":
                self._collect(index, message)
            case "stop" if self.proposal is None:
                self._propose(message["passed"] + LEAD)
            case "promise" if message["boundary"] == self.proposal:
                self._promised(index, message["passed"])
            case "heartbeat":
                self.last_heartbeats[index] = (message["heartbeat"], time.monotonic())
            case "blame":
                self.blamed = self.blamed or self._who_is_to_blame(message["allowed"])  # for all: they may end first
                send(connection, {"kind": "blame", "text": self.blamed})
            case "failed":
                self.left.add(index)  # it says so itself
                why = _one_line(message["line"].removeprefix("error: "), LONGEST_REASON)
                self._end(f"process {index} of {self.count} ({self.hosts[index]}): {why}", message["status"])
            case "leave":
                self.left.add(index)

    def _who_is_to_blame(self, allowed: float) -> str:
        """Return it in words; "" where they got on within the seconds that are `allowed`."""
        heartbeats = self.heartbeats()
        if not heartbeats:
            return "no process says any more where it is"
        found = to_blame(heartbeats)
        return found.text if found.idle > allowed else ""

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
            missing = [str(i) for i in range(self.count) if i not in self.hosts]
            if missing:
                came = ", ".join(f"{i} on {host}" for i, host in sorted(self.hosts.items()))
                strangers = f"; closed {self.door.strangers()}" if self.door.refused else ""
                which = f"process {', '.join(missing)} of {self.count}"
                self._end(f"{which} did not come up within {seconds:g} s (there are: {came}){strangers}", 1)

    def _end(self, line: str, status: int, also: socket.socket | None = None) -> None:
        if self.end is None:  # report the first cause only, not its consequences
            self.end = {"kind": "end", "line": line, "status": status}
            self._tell(self.end)
        if also:
            send(also, self.end)

    def _tell(self, message: dict) -> None:
        for index, connection in self.connections.items():
            if index not in self.left:
                send(connection, message)


def _one_line(text: str, longest: int) -> str:
    return " ".join(text.split())[:longest]
