# SPDX-License-Identifier: Apache-2.0
"""Alerts, with a real receiver that may fail or hang."""

import logging
import re
import threading
import time
import types

import pytest

from cluster.interruption import Interrupted
from configs import base
from configs.errors import ConfigError
from core import command_line, ending
from core.overrides import without_secrets
from reporting import sink
from reporting.metrics import MetricsWriter
from reporting.sinks import alerts
from settings.keys import flat, from_flat
from tests.receiver import Receiver, receiver
from tests.support import free_port


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Retry sooner than a run does."""
    monkeypatch.setattr(alerts, "PAUSES", (0.02, 0.04, 0.08))
    monkeypatch.setattr(alerts, "HURRIED_PAUSE", 0.02)
    monkeypatch.setattr(alerts, "SHORT_END_SECONDS", 0.5)
    monkeypatch.setattr(alerts, "END_SECONDS", 5.0)


def told(server: Receiver) -> list[tuple[str, str, int]]:
    return [(alert["event"], alert["text"], alert["step"]) for alert in server.taken]


def write_a_run(url: str, workdir, error: BaseException | None = None, process: int = 0) -> None:
    """Write the lines of a run that meets everything, and end it."""
    with MetricsWriter(workdir, sinks=[alerts.Alerts(url, "mine", process)], first=not process) as writer:
        writer.write("train", step=1, loss=2.0)
        for row in (1, 2):
            figures = {"loss": float("nan"), "gradient_norm": 123456.0, "in_a_row": row}
            writer.write("event", event="update_not_taken", step=row + 1, **figures)
        writer.write("event", event="roll_back", step=1, first_step=2, last_step=3)
        writer.write("event", event="save_failed", step=4, error="no space left")
        writer.write("event", event="saved", step=5)
        if error:
            raise error


def test_a_run_tells_what_someone_may_want_to_know_and_its_end(tmp_path):
    with receiver() as server:
        write_a_run(server.url, tmp_path)
    assert told(server) == [
        ("spike", "update skipped: loss not finite, gradient norm 1.235e+05", 2),
        ("spike", "rolled back; leaves out the batches of steps 2 to 3", 1),
        ("failed_checkpoint", "checkpoint not saved: no space left", 4),
        ("finish", "finished at step 5", 5),
    ]
    assert all(alert.keys() == {"run", "event", "text", "step", "time", "host"} for alert in server.taken)
    assert server.taken[0]["run"] == "mine" and abs(server.taken[0]["time"] - time.time()) < 60


def test_a_receiver_that_fails_at_first_gets_every_alert_once(tmp_path, caplog):
    with receiver(500, 503, 429) as server:
        write_a_run(server.url, tmp_path)
    assert len(told(server)) == 4 and server.attempts == 7 and not caplog.records


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (FloatingPointError("the loss is not finite"), "failure"),
        (MemoryError("no more"), "out_of_memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes"), "out_of_memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Failed to write file: No space left on device"), "failure"),
        (ConfigError("the step needs 65.0 GiB, but JAX gives arrays 60 GiB of a device"), "out_of_memory"),
    ],
)
def test_a_run_that_fails_tells_why(tmp_path, error, event):
    with receiver() as server, pytest.raises(type(error)):
        write_a_run(server.url, tmp_path, error)
    assert told(server)[-1] == (event, str(error), 5)


def test_an_interrupted_run_tells_nothing_and_waits_for_no_receiver(tmp_path, caplog):
    with receiver() as server, pytest.raises(Interrupted):
        write_a_run(server.url, tmp_path, Interrupted(5))
    assert [event for event, *_ in told(server)] == ["spike", "spike", "failed_checkpoint"]
    with receiver(hangs=True) as server:
        began = time.monotonic()
        with pytest.raises(Interrupted):
            write_a_run(server.url, tmp_path, Interrupted(5))
        assert time.monotonic() - began < alerts.SHORT_END_SECONDS + 0.5
    assert "alerts are lost: the receiver did not take them within" in caplog.text


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ("error: no step ended within 60 s: process 1 of 2 (host) is in step 7", "stall"),
        ("process 1 of 2 (host) died", "lost_worker"),
        ("process 1 of 2 (host): the disk is full", "failure"),
    ],
)
def test_a_process_that_ends_at_once_tells_why(tmp_path, monkeypatch, line, event):
    """As at a hang, or when another process was lost: nothing is unwound."""
    monkeypatch.setattr(ending, "_ending", threading.Lock())
    ended = []
    monkeypatch.setattr(ending.os, "_exit", ended.append)
    with receiver() as server:
        sinks = [alerts.Alerts(server.url, "mine")]
        try:
            ending._end(line, 1)
        finally:
            sinks[0].close(None)
    assert ended == [1] and told(server)[0][:2] == (event, line.removeprefix("error: "))


def test_a_last_word_that_fails_does_not_keep_the_process_from_its_end(monkeypatch):
    monkeypatch.setattr(ending, "_ending", threading.Lock())
    monkeypatch.setattr(ending, "LAST_WORDS", [lambda line, status: 1 / 0])
    ended = []
    monkeypatch.setattr(ending.os, "_exit", ended.append)
    with pytest.raises(ZeroDivisionError):  # os._exit would not return
        ending._end("error: a reason", 3)
    assert ended == [3]


def test_process_1_tells_only_that_process_0_is_lost(tmp_path):
    with receiver() as server:
        write_a_run(server.url, tmp_path, process=1)
        for line in ("error: process 2 of 3 (host) died", "error: a reason", "error: process 0 of 3 (host) died"):
            second = alerts.Alerts(server.url, "mine", 1)
            second.tell_end(line, 1)
            sink.LAST_WORDS.remove(second.tell_end)
    assert told(server) == [("lost_worker", "process 0 of 3 (host) died", 0)]


@pytest.mark.parametrize(("status", "attempts"), [(301, 1), (404, 1), (500, 4)])
def test_an_alert_that_is_not_delivered_is_a_line_of_the_log_without_the_address(caplog, status, attempts):
    with receiver(*[status] * 9) as server:
        one = alerts.Alerts(server.url, "mine")
        one.send("spike", "up")
        one.close(None)
    assert server.attempts == 2 * attempts
    said = f"the alert spike of step 0 is lost: the receiver answers with status {status}"
    assert caplog.records[0].message == said and "s3cret" not in caplog.text


def test_a_receiver_that_is_not_there_ends_nothing(tmp_path, caplog):
    with caplog.at_level(logging.ERROR):
        write_a_run(f"http://127.0.0.1:{free_port()}/s3cret", tmp_path)
    assert caplog.text.count("is lost: the receiver is out of reach (ConnectionRefusedError)") == 4
    assert "s3cret" not in caplog.text


def test_more_alerts_than_can_wait_are_lost_with_a_line(monkeypatch, caplog):
    monkeypatch.setattr(alerts, "MOST_WAITING", 2)
    with receiver(hangs=True) as server:
        one = alerts.Alerts(server.url, "mine")
        for _ in range(9):
            one.send("spike", "up")
        one.close(Interrupted(1))
    assert "the alert spike of step 0 is lost: 2 others wait" in caplog.text


def config_with(**values):
    config = base.get_config()
    config.logging.update(values)
    return config


def test_the_address_comes_from_the_key_or_the_environment_and_nothing_stores_it(monkeypatch, tmp_path):
    config = config_with(alerts="https://example.org/s3cret")
    assert flat(config)["logging.alerts"] == "(hidden)" and from_flat(flat(config)).logging.alerts == "(hidden)"
    argv = ["train.py", "--config.logging.alerts=https://example.org/s3cret", "--config.train.steps=3"]
    assert without_secrets(argv) == [argv[0], "--config.logging.alerts=(hidden)", argv[2]]
    assert without_secrets(["--config.logging.alerts", "http://a.b"])[1] == "(hidden)"
    twice = [f"--config.logging.alerts=http://{name}.example" for name in ("first", "second")]
    assert without_secrets(twice) == ["--config.logging.alerts=(hidden)"] * 2
    assert "s3cret" not in command_line.config_text(types.SimpleNamespace(config=config, origins={}))
    assert alerts.address_of(config).endswith("s3cret") and alerts.address_of(config_with()) == ""
    monkeypatch.setenv(alerts.VARIABLE, "https://example.org/other")
    assert alerts.address_of(config_with()).endswith("other")
    assert alerts.make(config_with(), tmp_path, 2) is None


@pytest.mark.parametrize("address", ["example.org/s3cret", "ftp://example.org/s3cret", "(hidden)", "https://"])
def test_what_is_no_web_address_is_told_without_it(address):
    with pytest.raises(ConfigError, match=re.escape("logging.alerts is not a web address; it should begin")) as error:
        sink.check(config_with(alerts=address))
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize("address", ["https://hooks..example.org/s3cret", "https://example.org/s3crét", "http://[a/b"])
def test_an_address_that_no_request_could_have_is_refused_and_ends_no_thread(address, caplog):
    with pytest.raises(ConfigError, match=r"logging.alerts is not a valid web address; copy it again"):
        sink.check(config_with(alerts=address))
    made = alerts.Alerts(address, "mine")
    made.send("spike", "as where the variable changes after the check")
    made.close(None)
    assert "the alert spike of step 0 is lost: " in caplog.text and "s3cr" not in caplog.text
