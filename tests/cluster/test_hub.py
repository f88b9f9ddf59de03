# SPDX-License-Identifier: Apache-2.0
"""The hub informs every process who is late, who died and what the others send; here the processes are threads."""

import concurrent.futures
import contextlib
import dataclasses
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest

from cluster import blame, line, messages, processes
from cluster.blame import Heartbeat
from cluster.hub import BOUNDARIES_TO_STOP, Hub, RunError
from cluster.line import Line
from tests.groups import free_ports
from tests.hubs import Member, make_hub, make_line, members
from tests.support import ROOT


@pytest.fixture(autouse=True)
def closed(monkeypatch):
    """Hubs and lines are closed after the test, those that fail to join too."""
    made = []

    def remember(kind):
        init = kind.__init__

        def made_and_remembered(self, *arguments, **keywords):
            made.append(self)
            init(self, *arguments, **keywords)

        monkeypatch.setattr(kind, "__init__", made_and_remembered)

    remember(Hub)
    remember(Line)
    yield
    for one in made:
        if isinstance(one, Line) and "connection" in vars(one):
            one.leaving = True
            with contextlib.suppress(OSError):
                one.connection.shutdown(2)
    for one in made:
        if isinstance(one, Hub) and "timer" in vars(one):
            one.close(0.1)


def wait_for(line: Line) -> None:
    """Join in a thread of a test that ends before the waiting does."""
    with contextlib.suppress(RunError):
        line.join()


def together(group: list[Member], call) -> list:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(call, group))


def test_all_get_the_values_of_all_in_order_again_and_again():
    group = members(4)
    for number in range(3):
        results = together(group, lambda member, n=number: member.line.gather("topic", [member.line.index, n]))
        assert results == [[[i, number] for i in range(4)]] * 4


def test_a_dead_process_is_named_to_the_others():
    group = members(3)
    group[1].line.connection.shutdown(2)
    for member in (group[0], group[2]):
        assert member.ended.wait(5) and member.end[1] == 1
        assert member.end[0].startswith("process 1 of 3 (") and member.end[0].endswith(") died")


def test_a_process_that_fails_is_quoted_with_its_status():
    group = members(2)
    group[1].line.fail("error: data.path='x': no such file", 2)
    assert group[0].ended.wait(5)
    assert group[0].end[0].endswith("): data.path='x': no such file") and group[0].end[1] == 2


def test_process_0_ends_only_when_the_others_have_been_told():
    hubs = []
    group = members(3, hubs=hubs)
    group[0].line.fail("error: disk full", 1)
    hubs[0].settle(5)
    for member in group[1:]:
        assert member.ended.wait(5) and member.end[0].endswith("): disk full")


def test_one_that_is_done_while_another_waits_for_its_value_ends_the_run():
    group = members(3)
    waiting = [threading.Thread(target=call, daemon=True) for call in (
        lambda: group[0].line.gather("data", 1), group[1].line.leave, lambda: group[2].line.gather("data", 1)
    )]  # fmt: skip
    for thread in waiting:
        thread.start()
    for member in group:
        assert member.ended.wait(5) and member.end[1] == 1
        assert re.fullmatch(r"process 1 of 3 \(.*\) has ended, and process [02] waits for it \(data 1\)", member.end[0])


def test_one_that_cannot_be_reached_is_not_blamed_on_the_one_that_was_being_answered():
    """TCP says so with other errors than a closed connection has."""
    unreachable = types.SimpleNamespace(sendall=fail_with(TimeoutError("timed out")))
    messages.send(unreachable, {"kind": "leave"})


def fail_with(error: Exception):
    def fail(*unused):
        raise error

    return fail


def test_who_leaves_with_all_the_others_is_not_dead():
    group = members(3)
    together(group, lambda member: member.line.leave())
    group[2].line.connection.shutdown(2)
    assert not group[0].ended.wait(0.5)


@pytest.mark.parametrize("seed", range(4))
def test_all_stop_at_the_same_boundary_however_far_apart_they_are(seed):
    """Boundaries of very different lengths; between two of them each may need all the others, as in a collective."""
    group, random = members(3), np.random.default_rng(seed)
    pauses = random.exponential(0.004, (3, 400))
    steps = [threading.Barrier(3) for _ in range(400)]

    def run(member: Member) -> int:
        for boundary in range(400):
            if boundary % 3 == seed % 3:
                steps[boundary].wait(10)
            time.sleep(pauses[member.line.index, boundary])
            if boundary == 20 + 7 * member.line.index:
                member.line.ask_to_stop()  # each a little later than the one before
            if member.line.boundary():
                return boundary
        return -1

    stopped = together(group, run)
    assert len(set(stopped)) == 1 and 20 < stopped[0] < 60


@pytest.mark.parametrize("lead", [0, 1])
def test_who_asks_for_a_stop_and_holds_goes_no_further_than_it_is_promised(lead):
    """No process is more than `lead` steps ahead of the slowest: in a run that is one, since a step waits for all."""
    group, asked_at = members(3), 30
    passed, changed = [0, 0, 0], threading.Condition()

    def run(member: Member) -> int:
        me = member.line.index
        while True:
            with changed:
                changed.wait_for(lambda: min(passed) >= passed[me] - lead, 10)
            if me == 1 and passed[me] == asked_at:
                member.line.ask_to_stop(hold=True)
            stops = member.line.boundary()
            with changed:
                passed[me] += 1
                changed.notify_all()
            if stops or passed[me] > 60:
                return passed[me]

    stopped = together(group, run)
    assert len(set(stopped)) == 1 and asked_at < stopped[0] <= asked_at + BOUNDARIES_TO_STOP


def test_nobody_is_to_blame_while_who_is_behind_gets_on():
    hubs = []
    group = members(3, hubs=hubs)
    for member in group:
        say(member.line, "data" if member.line.index == 2 else "wait", 28 if member.line.index == 2 else 30)
    wait_for_signs(hubs[0], [30, 30, 28])
    heartbeat = Heartbeat(2, "host-2", "data", 7, 28, 3.0, {}, doing="tokenizing: 30%", idle_seconds=0.0)
    group[2].line.send_heartbeat(vars(heartbeat))
    deadline = time.monotonic() + 5
    while hubs[0].heartbeats()[2].idle > 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert set(together(group, lambda member: member.line.blame(5, allowed=2.5))) == {""}
    (answer,) = set(together(group, lambda member: member.line.blame(5)))
    assert re.fullmatch(r"process 2 \(host-2\) has been in data of step 7 for 3\.\d s \(tokenizing: 30%\)", answer)


def test_a_stop_that_is_asked_for_amid_a_message_does_not_tear_it(monkeypatch):
    """A signal's handler runs in the thread that speaks, between the parts of a long message."""
    group, genuine = members(2), line.send

    def in_two_parts(connection, message):
        if message["kind"] != "value" or connection is not group[0].line.connection:
            return genuine(connection, message)
        text = json.dumps(message).encode() + b"\n"
        connection.sendall(text[:5])
        group[0].line.ask_to_stop()
        connection.sendall(text[5:])

    monkeypatch.setattr(line, "send", in_two_parts)
    values, deadline, stopped = [], time.monotonic() + 5, []
    for member in group:
        threading.Thread(target=lambda line=member.line: values.append(line.gather("topic", 0)), daemon=True).start()
    while len(values) < 2:
        assert not any(member.ended.wait(0.01) for member in group) and time.monotonic() < deadline
    while not any(stopped) and time.monotonic() < deadline:
        stopped = together(group, lambda member: member.line.boundary())
    assert stopped == [True, True]


def test_who_does_not_pass_boundaries_sees_that_a_stop_is_agreed(monkeypatch):
    """As a process of a study, which waits for a trial that trains."""
    group, deadline = members(3), time.monotonic() + 5
    for member in group:
        monkeypatch.setattr(processes, "_line", member.line)
        assert not processes.stop_agreed()
    group[1].line.ask_to_stop()
    for member in group:
        monkeypatch.setattr(processes, "_line", member.line)
        while not processes.stop_agreed():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_who_is_late_is_named_and_who_came_too():
    port = free_ports()
    make_hub(port, 3, 0.5)
    ends = []

    def join(index: int) -> None:
        wait_for(make_line(port, index, 3, 0.5, lambda *end: ends.append(end)))

    for index in (0, 2):
        threading.Thread(target=join, args=[index], daemon=True).start()
    wait = threading.Event()
    for _ in range(50):
        wait.wait(0.1)
        if len(ends) == 2:
            break
    line, status = ends[0]
    assert status == 1 and line.startswith("process 1 of 3 did not join within 0.5 s (joined: 0 on ")
    assert ", 2 on " in line


def test_without_process_0_the_others_name_it():
    port = free_ports()
    with pytest.raises(RunError, match=f"process 0 could not be reached at localhost:{port} within 0.3 s"):
        make_line(port, 1, 2, 0.3)


def test_who_comes_first_is_not_connected_to_itself(monkeypatch):
    """As the kernel does by chance, once in some 10,000 tries, for a port of those that it gives out."""
    port, reached = free_ports(), []

    def connect(address, timeout):
        if reached:
            return genuine(address, timeout)
        reached.append(socket.socket())
        reached[0].bind(address)
        reached[0].connect(address)
        assert reached[0].getsockname() == reached[0].getpeername()
        return reached[0]

    genuine = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(RunError, match="process 0 could not be reached"):
        make_line(port, 1, 2, 0.5)
    assert reached[0].fileno() == -1  # closed: process 0 may have its port


def test_a_taken_port_is_told():
    port = free_ports()
    make_hub(port, 2)
    with pytest.raises(RunError, match=f"^port {port} on this machine: Address already in use; use another"):
        make_hub(port, 2)


@pytest.mark.parametrize(
    ("index", "count", "message"),
    [
        (0, 2, "two processes have the index 0, one on "),
        (1, 3, " does not fit this run of 2 processes; give all the same count"),
    ],
)
def test_processes_that_were_told_different_things_end(index, count, message):
    port = free_ports()
    make_hub(port, 2)
    ends, told = [], threading.Event()

    def join(index: int, count: int) -> None:
        def on_end(*end):
            ends.append(end)
            told.set()

        wait_for(make_line(port, index, count, on_end=on_end))

    threading.Thread(target=join, args=[0, 2], daemon=True).start()
    threading.Event().wait(0.2)
    threading.Thread(target=join, args=[index, count], daemon=True).start()
    assert told.wait(5) and message in ends[0][0] and ends[0][1] == 2


def say(line: Line, phase: str, number: int) -> None:
    """Give a sign of life of the process."""
    heartbeat = Heartbeat(line.index, f"host-{line.index}", phase, step=7, number=number, phase_seconds=3.0, seconds={})
    line.send_heartbeat(dataclasses.asdict(heartbeat))


def wait_for_signs(hub: Hub, numbers: list[int]) -> None:
    deadline = time.monotonic() + 5
    while [heartbeat.number for heartbeat in hub.heartbeats()] != numbers:
        assert time.monotonic() < deadline, hub.heartbeats()
        time.sleep(0.01)


def is_named(text: str, process: int, began: float) -> bool:
    """Whether it says that a process is in the phase that it said, for 3 seconds and at most those since then."""
    found = re.fullmatch(rf"process {process} \(host-{process}\) has been in data of step 7 for (\d+\.\d) s", text)
    return bool(found) and 3.0 <= float(found[1]) <= 3.05 + time.monotonic() - began


def test_who_is_behind_is_named_to_all():
    hubs, began = [], time.monotonic()
    group = members(4, hubs=hubs)
    for member in group:
        say(member.line, "data" if member.line.index == 2 else "wait", 28 if member.line.index == 2 else 30)
    wait_for_signs(hubs[0], [30, 30, 28, 30])
    (answer,) = set(together(group, lambda member: member.line.blame(5)))
    assert is_named(answer, 2, began), answer


def test_who_is_to_blame_may_have_ended_by_that_when_the_others_ask():
    hubs, began = [], time.monotonic()
    group = members(3, hubs=hubs)
    for member in group:
        say(member.line, "data" if member.line.index == 1 else "wait", 28 if member.line.index == 1 else 30)
    wait_for_signs(hubs[0], [30, 28, 30])
    own = group[1].line.blame(5)
    group[1].line.send_heartbeat(None)
    wait_for_signs(hubs[0], [30, 30])
    assert own == group[0].line.blame(5)
    assert is_named(own, 1, began), own


def test_who_gives_no_more_signs_is_named_with_what_it_did_last(monkeypatch):
    monkeypatch.setattr(blame, "SILENT_SECONDS", 0.3)
    hubs = []
    group = members(4, hubs=hubs)
    for member in group:
        say(member.line, "step", 29)
    for number in range(30, 40):
        for member in group[:1] + group[2:]:
            say(member.line, "wait", number)
        time.sleep(0.05)
    assert re.fullmatch(
        r"process 1 \(host-1\) has sent no heartbeat for 0\.\d+ s; it was in step of step 7", group[3].line.blame(5)
    )


def test_who_has_not_come_to_what_the_others_wait_for_is_named():
    """Before any sign of life, too."""
    group = members(3)
    for member in group[:2]:
        threading.Thread(target=member.line.gather, args=["topic", None], daemon=True).start()
    time.sleep(0.2)
    assert re.fullmatch(
        rf"process 2 \({socket.gethostname()}\) has been in start-up for 0\.\d+ s", group[0].line.blame(5)
    )


def test_who_has_ended_its_watch_is_not_to_blame():
    hubs = []
    group = members(3, hubs=hubs)
    for member in group:
        say(member.line, "save", member.line.index)
    group[0].line.send_heartbeat(None)
    wait_for_signs(hubs[0], [1, 2])
    assert group[2].line.blame(5).startswith("process 1 (host-1) has been in save")


def test_where_all_have_ended_their_watch_nobody_is_to_blame():
    """The hub's thread raised an exception here, which ended process 0."""
    hubs = []
    (member,) = members(1, hubs=hubs)
    member.line.send_heartbeat(None)
    wait_for_signs(hubs[0], [])
    assert member.line.blame(5) == "no process sends heartbeats any more"


FROZEN = "import sys, time; from tests.hubs import make_hub; h = make_hub(int(sys.argv[1]), 1); time.sleep(60)"


def test_a_frozen_hub_is_not_waited_for_however_much_is_said():
    port = free_ports()
    with subprocess.Popen([sys.executable, "-c", FROZEN, str(port)], cwd=ROOT) as process:
        try:
            line = make_line(port, 0, 1)
            line.join()
            process.send_signal(signal.SIGSTOP)
            answers = []

            def speak() -> None:
                for _ in range(20_000):  # of hours; more than the sockets hold
                    line.send_heartbeat({"filling": "x" * 500})
                answers.append(line.blame(0.1))

            speaking = threading.Thread(target=speak, daemon=True)
            speaking.start()
            speaking.join(5)
            assert answers == [None]
        finally:
            line.leaving = True
            process.kill()
