# SPDX-License-Identifier: Apache-2.0
"""A run that hangs is ended by a line that names who hung, where and since when; its sign of life is never old."""

import contextlib
import json
import pathlib
import re
import shutil
import socket
import threading
import time
import types

import pytest

from cluster import blame, processes, watch
from cluster.hub import RunError
from cluster.watch import HeartbeatFile, watchdog
from reporting import clock as clocks
from reporting.clock import Clock
from tests.groups import free_ports
from tests.hubs import make_hub, make_line

HOST = re.escape(socket.gethostname())


@pytest.fixture
def raised(monkeypatch) -> list:
    """What threads raise, where they look often."""
    errors = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: errors.append(arguments.exc_value))
    monkeypatch.setattr(watch, "INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(watch, "START_SECONDS", 0.5)
    return errors


@pytest.fixture
def clock() -> Clock:
    """The clock of a process whose first step has just ended, and which now waits for data of the next."""
    clock = Clock(time.monotonic())
    for phase, step in (("data", 1), ("step", 1), ("wait", 1), ("data", 2)):
        clock.enter(phase, step)
    return clock


def wait_until(holds) -> None:
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Log:
    """What a heartbeat asks of a step log, with a step for each phase of its clock."""

    def __init__(self, clock: Clock, tell):
        self.goodput = types.SimpleNamespace(clock=clock, record=lambda: {"training": 5.0})
        self.event = lambda text, kind, **figures: tell(text, figures)

    @property
    def last_step(self) -> int:
        return self.goodput.clock.number


def heartbeat(clock: Clock, workdir: pathlib.Path, tell=lambda text, figures: None) -> HeartbeatFile:
    return HeartbeatFile(workdir, Log(clock, tell))


def sign_of_life(workdir: pathlib.Path) -> dict:
    return json.loads((workdir / "workers" / "0.json").read_text())


def test_a_process_alone_that_hangs_says_where_and_leaves_the_stacks(raised, clock, tmp_path):
    log = tmp_path / "logs" / "log"
    with watchdog(clock, 0.2, log):
        wait_until(lambda: raised)
    (error,) = raised
    assert isinstance(error, RunError)
    line = rf"no step ended within 0\.2 s: process 0 \({HOST}\) has been in data of step 2 for 0\.\d+ s; "
    assert re.fullmatch(f"{line}{re.escape(str(log))} has the stacks of all threads", str(error))
    assert "test_a_process_alone_that_hangs_says_where_and_leaves_the_stacks" in log.read_text()


def test_phases_that_end_and_a_long_start_are_no_hang(raised, clock, tmp_path):
    with watchdog(Clock(time.monotonic()), 0.2, tmp_path / "log"):
        time.sleep(0.35)
    with watchdog(clock, 0.6, tmp_path / "log"):
        for _ in range(4):
            clock.enter("evaluation")  # the next part of it
            time.sleep(0.2)
    assert not raised and not (tmp_path / "log").exists()


def test_what_gets_on_is_no_hang_until_it_does_no_more(raised, clock, tmp_path):
    """Shards that are built again, say, in a thread that reads ahead."""
    with watchdog(clock, 0.6, tmp_path / "log"):
        for _ in range(4):
            clock.progress("tokenizing: 30%")
            time.sleep(0.2)
        assert not raised
        wait_until(lambda: raised)
    said = rf"no step ended within 0\.6 s: process 0 \({HOST}\) has been in data of step 2 for \d\.\d+ s "
    assert re.match(said + r"\(tokenizing: 30%\); ", str(raised[0]))


def test_nothing_is_a_hang_where_that_is_off(raised, clock, tmp_path):
    with watchdog(clock, 0, tmp_path / "log"):
        time.sleep(0.1)
    assert not raised


def test_stacks_that_cannot_be_written_keep_no_hang_from_ending_the_run(raised, clock, tmp_path):
    (tmp_path / "logs").write_text("a file where a folder should be")
    with watchdog(clock, 0.1, tmp_path / "logs" / "log"):
        wait_until(lambda: raised)
    assert isinstance(raised[0], RunError)


def test_the_file_is_fresh_while_a_phase_lasts(raised, clock, tmp_path):
    with heartbeat(clock, tmp_path):
        for phase, word in watch.IN_WORDS.items():
            clock.enter(phase)
            wait_until(lambda w=word: sign_of_life(tmp_path)["phase"] == w)
            wait_until(lambda: sign_of_life(tmp_path)["step"] == clock.number)
        first = sign_of_life(tmp_path)
        wait_until(lambda: sign_of_life(tmp_path)["phase_seconds"] > first["phase_seconds"] + 0.5)
        # When the phase began. A busy machine may stop the thread between its looks at its two clocks.
        assert sign_of_life(tmp_path)["time"] == pytest.approx(first["time"], abs=0.25)
    last = sign_of_life(tmp_path)
    assert (last["phase"], last["phase_seconds"], last["seconds"]) == ("finished", 0.0, {"training": 5.0})
    assert last.keys() == {
        "process", "host", "pid", "code", "step", "phase", "time", "phase_seconds", "seconds", "host_memory_gib",
        "device_memory_gib", "device_memory_peak_gib",
    }  # fmt: skip
    assert last["time"] == pytest.approx(time.time(), abs=2)


def test_the_file_says_that_data_is_built_again_and_since_when_that_gets_on(raised, clock, tmp_path):
    with heartbeat(clock, tmp_path):
        time.sleep(0.5)
        before = time.time()
        clock.progress("tokenizing: 30%")
        after = time.time()
        wait_until(lambda: sign_of_life(tmp_path)["phase"] == "building")
        # A busy machine may stop the thread between its looks at its two clocks.
        assert before - 0.25 < sign_of_life(tmp_path)["time"] < after + 0.25
        clock.enter("step")
        wait_until(lambda: sign_of_life(tmp_path)["phase"] == "training")


def test_every_phase_has_a_word_for_the_pod():
    assert set(watch.IN_WORDS) == set(clocks.PHASES)


@pytest.mark.parametrize(("error", "phase"), [(KeyboardInterrupt, "stopped"), (ValueError, "failed")])
def test_what_is_interrupted_has_stopped_and_what_an_error_ends_has_failed(raised, clock, tmp_path, error, phase):
    with contextlib.suppress(error), heartbeat(clock, tmp_path):
        raise error
    assert sign_of_life(tmp_path)["phase"] == phase


def test_a_folder_that_vanishes_or_cannot_be_written_ends_nothing(raised, clock, tmp_path):
    folder = tmp_path / "workers"
    with heartbeat(clock, tmp_path):
        shutil.rmtree(folder, ignore_errors=True)  # the thread may write meanwhile
        wait_until((folder / "0.json").exists)
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the folder may be there again
            folder.write_text("a file where a folder should be")
        time.sleep(0.1)
    assert not raised


def test_the_end_of_the_block_leaves_no_thread(raised, clock, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "INTERVAL_SECONDS", 60.0)
    before, began = set(threading.enumerate()), time.monotonic()
    with watchdog(clock, 100, tmp_path / "log"), heartbeat(clock, tmp_path):
        started = set(threading.enumerate()) - before  # a thread of an earlier test may end meanwhile
        assert {"watchdog", "heartbeat"} == {thread.name for thread in started}
    assert not any(thread.is_alive() for thread in started) and time.monotonic() - began < 2


@pytest.fixture
def pair(monkeypatch):
    """Two processes: this one is number 0, which holds the hub; yields the line of the other."""
    port = free_ports()
    hub = make_hub(port, 2)
    lines = [make_line(port, i, 2) for i in range(2)]
    for line in lines:
        line.join()
    monkeypatch.setattr(processes, "_hub", hub)
    monkeypatch.setattr(processes, "_line", lines[0])
    yield lines[1]
    for line in lines:
        line.leaving = True
        line.connection.shutdown(socket.SHUT_RDWR)
    hub.close(1.0)


def test_process_0_tells_who_holds_up_the_others(raised, clock, tmp_path, pair, monkeypatch):
    monkeypatch.setattr(blame, "SLOW_SECONDS", 0.2)
    told = []
    for _ in range(2):
        clock.enter("wait")
    with watchdog(clock, 0, tmp_path / "log"), heartbeat(clock, tmp_path, lambda *telling: told.append(telling)):
        other = Clock(time.monotonic())
        other.enter("data", 2)
        while not told:
            pair.send_heartbeat(heartbeat_as_dict(other, 1))
            time.sleep(0.02)
    text, figures = told[0]
    assert re.fullmatch(
        r"process 1 \(host-1\) has been in data of step 2 for 0\.\d+ s; the others have waited 0\.\d+ s", text
    )
    assert json.loads(json.dumps(figures))["processes"] == [1] and figures["phase"] == "data"


def test_every_process_names_who_hangs(raised, clock, tmp_path, pair, monkeypatch):
    """As process 1, which asks; and by itself where the hub is silent."""
    processes.send_heartbeat(watch._heartbeat(clock))
    monkeypatch.setattr(processes, "_hub", None)
    monkeypatch.setattr(processes, "_line", pair)
    clock.enter("wait", 2)
    with watchdog(clock, 0.1, tmp_path / "log"):
        wait_until(lambda: raised)
    assert re.match(
        rf"no step ended within 0\.1 s: process 0 \({HOST}\) has been in data of step 2 for 0\.\d+ s; ", str(raised[0])
    )
    monkeypatch.setattr(processes, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(pair, "_say_at_once", lambda **message: None)
    here = rf"process 1 \({HOST}\) has been in step of step 2 for 0\.\d+ s"
    line = rf"process 0 \({HOST}\) does not answer within 0\.1 s; {here}"
    assert re.fullmatch(line, processes.blame(watch._heartbeat(clock)))


def test_who_waits_for_a_process_that_gets_on_is_no_hang(raised, clock, tmp_path, pair):
    for _ in range(2):
        clock.enter("wait")
    other = Clock(time.monotonic())
    other.enter("data", 2)
    with watchdog(clock, 0.2, tmp_path / "log"):
        for _ in range(20):
            other.progress("tokenizing: 30%")
            pair.send_heartbeat(heartbeat_as_dict(other, 1))
            time.sleep(0.02)
        assert not raised
        wait_until(lambda: raised)
    assert "process 1 (host-1) has been in data of step 2 for 0." in str(raised[0])


def heartbeat_as_dict(clock: Clock, process: int) -> dict:
    """Return a sign of another process as its line would say it."""
    return vars(watch._heartbeat(clock)) | {"process": process, "host": f"host-{process}"}
