# SPDX-License-Identifier: Apache-2.0
"""Notices of maintenance, by a server that answers as Compute Engine's metadata server does."""

import queue
import threading

import pytest

from cluster import maintenance
from cluster import metadata as compute_engine
from cluster.maintenance import maintenance_notices
from tests.metadata_server import Metadata


@pytest.fixture
def metadata(monkeypatch):
    monkeypatch.setattr(maintenance, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(maintenance, "LONGEST_PAUSE_SECONDS", 0.05)
    monkeypatch.setenv("http_proxy", "http://localhost:9")  # is not asked
    with Metadata() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", server.host)
        yield server
        server.shutdown()


@pytest.fixture
def notices() -> queue.Queue:
    return queue.Queue()


@pytest.mark.parametrize(
    ("key", "value"), [("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"), ("preempted", "TRUE")]
)
def test_the_end_of_the_machine_is_told_once(metadata, notices, key, value):
    with maintenance_notices(notices.put):
        metadata.wait_for_requests(4)  # each key twice: the second request hangs
        assert notices.empty()
        metadata.set(key, value)
        assert notices.get(timeout=10).endswith(f"instance/{key} is {value}")
        for key, value in maintenance.ENDS.items():
            metadata.set(key, value)
    assert notices.empty()


def test_a_machine_that_is_moved_alive_is_not_told_of(metadata, notices):
    with maintenance_notices(notices.put):
        metadata.wait_for_requests(4)
        metadata.set("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")
        metadata.wait_for_requests(5)
        metadata.set("maintenance-event", "NONE")
        metadata.wait_for_requests(6)
    assert notices.empty()


def test_a_server_that_fails_is_asked_again(metadata, notices, capfd):
    metadata.failing = True
    with maintenance_notices(notices.put):
        metadata.wait_for_requests(6)
        metadata.failing = False
        metadata.set("preempted", "TRUE")
        assert "preempted" in notices.get(timeout=10)
    assert capfd.readouterr() == ("", "")


def test_nothing_is_told_after_the_block(metadata, notices):
    with maintenance_notices(notices.put):
        metadata.wait_for_requests(4)
    metadata.set("preempted", "TRUE")
    later = queue.Queue()
    with maintenance_notices(later.put):
        assert later.get(timeout=10)
    assert notices.empty()


def test_the_firmware_says_where_there_is_a_metadata_server(monkeypatch, tmp_path):
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    monkeypatch.setattr(compute_engine, "PRODUCT", tmp_path / "product_name")
    before = set(threading.enumerate())
    with maintenance_notices(print):
        assert set(threading.enumerate()) <= before
    (tmp_path / "product_name").write_text("Google Compute Engine\n")
    assert compute_engine.find_host() == "metadata.google.internal"
    (tmp_path / "product_name").write_text("Standard PC\n")
    assert compute_engine.find_host() is None
