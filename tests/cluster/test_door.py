# SPDX-License-Identifier: Apache-2.0
"""The hub reads messages only from peers that know the secret of the run; others do no harm."""

import contextlib
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from cluster import door, line, messages
from cluster.hub import RunError
from cluster.secret import FROM_FOLDER, NOWHERE, VARIABLE, Secret
from tests import hostile
from tests.groups import free_ports
from tests.hubs import SECRET, Member, make_hub, make_line, members
from tests.support import ROOT

FEW_DESCRIPTORS = 200
HUB = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({FEW_DESCRIPTORS}, {FEW_DESCRIPTORS}))
from cluster import door
from cluster.addresses import listen
from cluster.hub import Hub
from cluster.secret import Secret
door.MOST_STRANGERS = int(sys.argv[2])
hub = Hub(listen("127.0.0.1", int(sys.argv[1])), 1, 60, Secret({VARIABLE!r}, {SECRET.value!r}))
print("listens", flush=True)
input()
"""


@contextlib.contextmanager
def hub_process(port: int, most_strangers: int = door.MOST_STRANGERS):
    """A process that holds a hub for one process, with few descriptors; gives it."""
    command = [sys.executable, "-c", HUB, str(port), str(most_strangers)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "listens\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def running():
    """A run of two processes, and its hub."""
    hubs = []
    group = members(2, hubs)
    yield group, hubs[0]
    for member in group:
        member.line.leaving = True
        member.line.connection.shutdown(socket.SHUT_RDWR)
    hubs[0].close(1.0)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def goes_on(group: list[Member]) -> bool:
    """Whether all processes still hear each other."""
    values: list = []
    threads = [threading.Thread(target=lambda m=m: values.append(m.line.gather("on", m.line.index))) for m in group]
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join(10)
    return values == [[0, 1]] * 2 and not any(member.ended.is_set() for member in group)


@pytest.mark.parametrize("what", hostile.ATTACKS)
def test_what_a_stranger_sends_ends_no_run_and_is_counted(running, what):
    """Five of these ended all processes before there was a secret."""
    group, hub = running
    before = hub.door.refused
    hostile.strike(int(group[0].line.address.rpartition(":")[2]), hostile.ATTACKS[what])
    wait_for(lambda: hub.door.refused > before)
    assert hub.end is None and goes_on(group)


def test_strangers_are_reported_once_with_the_first_address():
    hub = make_hub(port := free_ports(), 2)
    assert hub.door.report() == ""
    for _ in range(3):
        hostile.strike(port, hostile.ATTACKS["a wrong proof"])
    wait_for(lambda: hub.door.refused == 3)
    said = "closed 3 connections that did not know the secret of the run (the first from 127.0.0.1)"
    assert (hub.door.report(), hub.door.report()) == (said, "")
    hub.close(0.1)


def test_a_line_without_an_end_takes_no_memory():
    with hub_process(port := free_ports()) as process:
        before = resident_mib(process.pid)
        with socket.create_connection(("127.0.0.1", port)) as stranger, contextlib.suppress(ConnectionError):
            for _ in range(100):
                stranger.sendall(b"x" * (1 << 20))
        assert resident_mib(process.pid) - before < 20


def test_an_endless_line_after_the_join_ends_too(monkeypatch):
    monkeypatch.setattr(messages, "LONGEST_MESSAGE", 1 << 16)
    monkeypatch.setattr(messages.read, "__defaults__", (1 << 16,))
    group = members(2)
    group[1].line.connection.sendall(b"x" * (1 << 17))
    assert group[0].ended.wait(5)
    assert re.fullmatch(
        r"process 1 of 2 \(.+\) sent an invalid message: a message is longer than 65,536 bytes", group[0].end[0]
    )


def test_strangers_that_say_nothing_leave_the_door_to_others():
    """More than there are descriptors."""
    with hub_process(port := free_ports()) as process:
        idle = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(FEW_DESCRIPTORS + 50)]
        assert len(list(pathlib.Path(f"/proc/{process.pid}/fd").iterdir())) < door.MOST_STRANGERS + 20
        Member(port, 0, 1).line.leaving = True
        for connection in idle:
            connection.close()


def test_a_hub_without_descriptors_goes_on_when_it_has_some():
    with hub_process(port := free_ports(), most_strangers=10**6):
        idle = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(FEW_DESCRIPTORS + 50)]
        time.sleep(2 * door.PAUSE_SECONDS)
        with pytest.raises(RunError, match="could not be reached"):
            make_line(port, 0, 1, 0.5)
        for connection in idle:
            connection.close()
        Member(port, 0, 1).line.leaving = True


def test_silence_is_timed_out(monkeypatch):
    monkeypatch.setattr(door, "PROOF_SECONDS", 0.2)
    hub = make_hub(port := free_ports(), 1)
    with socket.create_connection(("127.0.0.1", port), 5) as stranger:
        assert len(stranger.recv(door.GREETING_BYTES)) == door.GREETING_BYTES
        assert stranger.recv(1) == b""
    with socket.create_connection(("127.0.0.1", port), 5) as known:
        door.prove(known, lambda: SECRET)  # and then says nothing
        assert known.recv(1) == b""
    hub.close(0.1)


def test_a_stranger_on_the_port_of_the_hub_ends_no_process(monkeypatch):
    """The process goes on trying, and joins the hub when it is there."""
    monkeypatch.setattr(line, "REFUSED_SECONDS", 0.1)
    port, heard = free_ports(), []
    said = [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 99, door.MAGIC + bytes([0]) + bytes(64),
            b'{"kind": "end", "line": "all is lost", "status": 2}\n' * 9]  # fmt: skip
    joined = threading.Event()

    def join() -> None:
        member = Member(port, 0, 1, 20.0)
        heard.append(member.end)
        member.line.leaving = True
        joined.set()

    with socket.create_server(("127.0.0.1", port)) as listener:
        threading.Thread(target=join, daemon=True).start()
        for text in said:
            with listener.accept()[0] as connection:
                connection.sendall(text)
    hub = make_hub(port, 1)
    assert joined.wait(20) and heard == [None]
    hub.close(1.0)


@pytest.mark.parametrize(
    ("secret", "why"),
    [
        (
            Secret(VARIABLE, b"another secret of the same kind"),
            f"from {VARIABLE}, this process from {VARIABLE}; they differ; give all",
        ),
        (
            Secret(NOWHERE, b""),
            f"from {VARIABLE}, this process from nowhere; they differ; give all processes the same secret",
        ),
        (
            Secret(FROM_FOLDER, SECRET.value),
            f"from {VARIABLE}, this process from the folder of the run; they differ",
        ),
    ],
)
def test_processes_with_different_secrets_are_told_where_they_are_from(secret, why):
    """Process 0 reports that someone tried to connect."""
    hub = make_hub(port := free_ports(), 2, 0.2)
    member = make_line(port, 0, 2)
    with pytest.raises(RunError) as error:
        make_line(port, 1, 2, 0.2, secret=secret)
    assert why in str(error.value) and SECRET.value.decode() not in str(error.value) + repr(secret) + repr(SECRET)
    wait_for(lambda: hub.end)
    assert "process 1 of 2 did not join within 0.2 s (joined: 0 on " in hub.end["line"]
    assert "); closed 1 connection that did not know the secret of the run (the first from" in hub.end["line"]
    member.leaving = True
    hub.close(0.1)


def test_a_process_that_comes_to_a_run_with_all_its_processes_is_refused_and_the_run_goes_on(running):
    """As in a second start of the same run by mistake: it knows the secret, too."""
    group, hub = running
    port = int(group[0].line.address.rpartition(":")[2])
    for index, count in ((1, 2), (1, 3), (5, 2)):
        ends, told = [], threading.Event()
        late = make_line(port, index, count, on_end=lambda *end, e=ends, t=told: (e.append(end), t.set()))
        assert told.wait(5)
        text, status = ends[0]
        assert re.match(rf"process {index} \(.+\) is one too many: all 2 processes of the run have joined; ", text)
        assert status == 1 and late.hosts == []
    assert hub.end is None and goes_on(group)


def test_a_proof_serves_for_one_connection():
    """What was heard on the way is of no use to who says it again."""
    hub, said = make_hub(port := free_ports(), 1), []

    class Recorded(socket.socket):
        def sendall(self, data):
            said.append(data)
            super().sendall(data)

    for answer in (None, said):
        with Recorded() as connection:
            connection.settimeout(5)
            connection.connect(("127.0.0.1", port))
            if answer is None:
                door.prove(connection, lambda: SECRET)
            else:
                connection.recv(door.GREETING_BYTES)
                connection.send(said[0])
                assert connection.recv(1) == b""
    assert hub.door.refused == 1
    hub.close(0.1)


def resident_mib(pid: int) -> float:
    return int(re.search(r"VmRSS:\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())[1]) / 1024
