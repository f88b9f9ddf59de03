# SPDX-License-Identifier: Apache-2.0
"""The control plane of a run: who has joined, who died, and which values all processes agree on.

Process 0 runs the hub. Every process, including process 0, connects to it (cluster/line.py) and proves that it
knows the secret of the run (cluster/door.py). The hub does not use jax: device collectives hang or abort when a
process is missing, and the hub then names that process.
"""

import collections
import dataclasses
import socket
import threading
import time

from cluster import messages
from cluster.blame import Heartbeat, to_blame
from cluster.door import Door
from cluster.messages import send
from cluster.secret import Secret
from files.json_reader import JsonError

LEAD = 2  # boundaries from the furthest process to the proposed stop
# A process that requests a stop with `hold` passes at most this many boundaries before all stop; others pass one more.
BOUNDARIES_TO_STOP = LEAD + 3
LEAVE_SECONDS = 10.0
LEAVING = "leave"  # topic of the processes that are done
ACTING = "act"  # topic of what callbacks returned: the number of the phase (reporting/clock.py), the step, the actions
LONGEST_HOST, LONGEST_REASON = 255, 1500  # characters of a process's text that are kept


class RunError(RuntimeError):
    """An error that ends a run and is not the user's mistake; the message names the process, the device or the disk."""

    exit_status = 1


class Hub:
    """The hub, in process 0: exchanges values between processes, and notifies all when one is gone."""

    def __init__(self, listener: socket.socket, count: int, join_seconds: float, secret: Secret):
        """Accept processes at `listener`; all `count` of them must join within `join_seconds` from now on."""
        self.count, self.changed = count, threading.Condition()
        self.connections: dict[int, socket.socket] = {}
        self.hosts: dict[int, str] = {}
        self.left: set[int] = set()
        self.values: dict[str, dict[int, object]] = collections.defaultdict(dict)
        self.end: dict | None = None
        self.proposal, self.promises, self.blamed = None, {}, ""
        self.last_heartbeats: dict[int, tuple[Heartbeat | None, float]] = {}  # with their times; None: ended
        self.door = Door(listener, secret, self._serve)
        self.timer = threading.Timer(join_seconds, self._check_all_came, [join_seconds])
        self.timer.daemon = True
        self.timer.start()

    def heartbeats(self) -> list[Heartbeat]:
        """Return the last heartbeat of every connected process that has not ended its heartbeats, in rank order."""
        with self.changed:
            waiting = {index for given in self.values.values() for index in given}
            last = sorted(self.last_heartbeats.items())
            here = [(index, beat, since) for index, (beat, since) in last if index not in self.left and beat]
            now = time.monotonic()
            return [dataclasses.replace(beat, age=now - since, waits=n in waiting) for n, beat, since in here]

    def settle(self, seconds: float) -> None:
        """Wait until the end of the run was sent to all processes, at most `seconds`, before process 0 ends."""
        with self.changed:
            self.changed.wait_for(lambda: self.end, seconds)

    def close(self, seconds: float = LEAVE_SECONDS) -> None:
        """Close the hub when every process has left, at the latest after `seconds`."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.left) == self.count, seconds)
        self.door.close()
        self.timer.cancel()

    def _serve(self, connection: socket.socket) -> None:
        """Handle the messages of one process, in its own thread, until its connection ends."""
        index, why = None, "died"
        with connection.makefile("rb") as lines:
            try:
                index = self._join(lines, connection)
                if index is not None:
                    self._take_all(index, lines, connection)
            except OSError:  # a connection that breaks counts as a death
                pass
            except JsonError as error:
                why = f"sent an invalid message: {error}"
        with self.changed:
            if index is not None and index not in self.left:
                self._end(f"process {index} of {self.count} ({self.hosts[index]}) {why}", 1)
            self.left |= {index} - {None}
            self.changed.notify_all()

    def _join(self, lines, connection: socket.socket) -> int | None:
        """Return the index of a process that joins; None if it cannot join, after a message with the reason.

        Raises JsonError or OSError if its first message is not a valid one.
        """
        message = messages.read(lines, messages.JOINING, messages.LONGEST_JOIN)
        if message is None:
            return None
        index, host = message["index"], _one_line(message["host"], LONGEST_HOST)
        with self.changed:
            if len(self.hosts) == self.count:  # a second start must not end this run
                line = f"process {index} ({host}) is one too many: all {self.count} processes of the run have joined"
                remedy = "wait until that run has ended, or use another coordinator port"
                send(connection, {"kind": "end", "line": f"{line}; {remedy}", "status": 1})
            elif message["count"] != self.count or not 0 <= index < self.count:
                what = f"process {index} of {message['count']} ({host}) does not fit this run of {self.count} processes"
                self._end(
                    f"{what}; give all the same count, and indices from 0 to {self.count - 1}", 2, also=connection
                )
            elif index in self.hosts:
                hosts = f"one on {self.hosts[index]}, one on {host}"
                self._end(f"two processes have the index {index}, {hosts}; give each its own", 2, also=connection)
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

    def _take_all(self, index: int, lines, connection: socket.socket) -> None:
        while message := messages.read(lines, messages.TO_HUB):
            with self.changed:
                self._take(index, message, connection)
                self.changed.notify_all()

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
                self._check_all_act()
            case "blame":
                self.blamed = self.blamed or self._who_is_to_blame(message["allowed"])  # the same for all
                send(connection, {"kind": "blame", "text": self.blamed})
            case "failed":
                self.left.add(index)  # it reports its own end
                why = _one_line(message["line"].removeprefix("error: "), LONGEST_REASON)
                self._end(f"process {index} of {self.count} ({self.hosts[index]}): {why}", message["status"])
            case "leave":
                self.left.add(index)

    def _who_is_to_blame(self, allowed: float) -> str:
        """Describe the process that blocks the run; "" if it made progress within the last `allowed` seconds."""
        heartbeats = self.heartbeats()
        if not heartbeats:
            return "no process sends heartbeats any more"
        found = to_blame(heartbeats)
        return found.text if found.idle > allowed else ""

    def _collect(self, index: int, message: dict) -> None:
        topic = message["topic"]
        self.values[topic][index] = message["value"]
        if len(self.values[topic]) == self.count:
            values = self.values.pop(topic)
            self._tell({"kind": "values", "topic": topic, "values": [values[i] for i in range(self.count)]})
        self._check_none_waits_for_one_that_leaves()

    def _check_none_waits_for_one_that_leaves(self) -> None:
        leaving = {index for topic, given in self.values.items() if topic.startswith(LEAVING) for index in given}
        for topic, given in self.values.items():
            if not topic.startswith(LEAVING) and (ended := sorted(leaving - given.keys())):
                who = f"process {ended[0]} of {self.count} ({self.hosts[ended[0]]})"
                self._end(f"{who} has ended, and process {min(given)} waits for it ({topic})", 1)

    def _check_all_act(self) -> None:
        """End the run if a process has gone on to the next step, and callbacks of another one acted before it.

        The numbers tell it from the heartbeat of a step before a roll back.
        """
        for given in (given for topic, given in self.values.items() if topic.startswith(ACTING)):
            first, (number, step, names) = min(given.items())
            for index, (beat, _) in self.last_heartbeats.items():
                if index not in given and beat and beat.step > step and beat.number > number:
                    self._end(
                        f"callbacks returned {names} after step {step} in process {first} ({self.hosts[first]}), and "
                        f"nothing in process {index} ({self.hosts[index]}); they must return the same in all processes",
                        1,
                    )

    def _propose(self, boundary: int) -> None:
        """Ask all to wait at a boundary until all have promised it; if one has passed it, a later one is proposed."""
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
                self._end(f"{which} did not join within {seconds:g} s (joined: {came}){strangers}", 1)

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
