# SPDX-License-Identifier: Apache-2.0
"""Notices of maintenance, by a server that answers as Compute Engine's metadata server does."""

import http.server
import queue
import threading
import urllib.parse

import pytest

from training import maintenance
from training.maintenance import maintenance_notices


class Metadata(http.server.ThreadingHTTPServer):
    """Holds the values of instance/...; a request may hang until its value changes."""

    daemon_threads = True

    def __init__(self):
        self.values = {"maintenance-event": "NONE", "preempted": "FALSE"}
        self.changed, self.failing, self.num_requests = threading.Condition(), False, 0
        super().__init__(("localhost", 0), Answer)

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def wait_for_requests(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.num_requests >= number, 10)


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        url, server = urllib.parse.urlsplit(self.path), self.server
        asked = dict(urllib.parse.parse_qsl(url.query))
        key = url.path.removeprefix("/computeMetadata/v1/instance/")
        with server.changed:
            server.num_requests += 1
            server.changed.notify_all()
            if server.failing or self.headers["Metadata-Flavor"] != "Google":
                self.send_error(503 if server.failing else 403)
                return
            if asked["wait_for_change"] == "true":
                server.changed.wait_for(
                    lambda: server.values[key] != asked["last_etag"], timeout=float(asked["timeout_sec"])
                )
            value = server.values[key]
        self.send_response(200)
        self.send_header("ETag", value)  # which is told by the value itself
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value.encode())

    def log_message(self, *unused):
        """Keep quiet."""


@pytest.fixture
def metadata(monkeypatch):
    monkeypatch.setattr(maintenance, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(maintenance, "LONGEST_PAUSE_SECONDS", 0.05)
    monkeypatch.setenv("http_proxy", "http://localhost:9")  # is not asked
    with Metadata() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", "localhost:{1}".format(*server.server_address))
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
    monkeypatch.setattr(maintenance, "PRODUCT", tmp_path / "product_name")
    before = threading.active_count()
    with maintenance_notices(print):
        assert threading.active_count() == before
    (tmp_path / "product_name").write_text("Google Compute Engine\n")
    assert maintenance.metadata_host() == "metadata.google.internal"
    (tmp_path / "product_name").write_text("Standard PC\n")
    assert maintenance.metadata_host() is None
