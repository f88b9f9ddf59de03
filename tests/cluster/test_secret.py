# SPDX-License-Identifier: Apache-2.0
"""A process takes the secret of its run from the first place that has one."""

import socket
import threading

import pytest

from cluster import metadata, secret
from cluster.secret import ATTRIBUTE, FROM_FOLDER, FROM_METADATA, NOWHERE, RunSecret, Secret
from configs.errors import ConfigError
from files.paths import PathError
from tests.metadata_server import Metadata

GOOD, OTHER = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def machine(monkeypatch):
    """A metadata server, whose values the test sets."""
    monkeypatch.setattr(secret, "METADATA_PAUSE_SECONDS", 0.01)
    with Metadata() as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", server.host)
        yield server
        server.shutdown()


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """A machine outside Compute Engine."""
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    monkeypatch.setattr(metadata, "PRODUCT", tmp_path / "none")


def write(path, text: str, mode: int = 0o600):
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_the_first_place_that_has_a_secret_counts(machine, tmp_path):
    folder = tmp_path / "run"
    everywhere = {"TORUS_RUN_SECRET": GOOD, "TORUS_RUN_SECRET_FILE": write(tmp_path / "file", f"{OTHER}\n")}
    machine.values[f"attributes/{ATTRIBUTE}"] = GOOD[::-1]
    for name, expected in [
        ("TORUS_RUN_SECRET", Secret("TORUS_RUN_SECRET", GOOD.encode())),
        ("TORUS_RUN_SECRET_FILE", Secret("TORUS_RUN_SECRET_FILE", OTHER.encode())),
        (None, Secret(FROM_METADATA, GOOD[::-1].encode())),
    ]:
        for first in (True, False):
            assert RunSecret(everywhere, folder, first=first).find() == expected
        everywhere.pop(name, None)
    assert not folder.exists()
    del machine.values[f"attributes/{ATTRIBUTE}"]
    assert RunSecret({}, folder, first=True).find().source == FROM_FOLDER
    assert RunSecret({}, None, first=True).find() == Secret(NOWHERE, b"")


def test_a_metadata_server_that_fails_is_asked_again_and_then_has_none(machine):
    machine.values[f"attributes/{ATTRIBUTE}"], machine.failing = GOOD, True
    assert RunSecret({}, None, first=True).find().source == NOWHERE
    assert machine.num_requests == secret.METADATA_TRIES


@pytest.mark.parametrize(
    ("variable", "content", "mode", "message"),
    [
        ("TORUS_RUN_SECRET", "short", None, "TORUS_RUN_SECRET has fewer than 16 characters"),
        ("TORUS_RUN_SECRET", " " * 40, None, "TORUS_RUN_SECRET has fewer than 16 characters"),
        ("TORUS_RUN_SECRET_FILE", "short", 0o600, "file has fewer than 16 characters"),
        ("TORUS_RUN_SECRET_FILE", GOOD, 0o640, "can be read by other users; run chmod 600 "),
        ("TORUS_RUN_SECRET_FILE", GOOD, 0o604, "can be read by other users; run chmod 600 "),
        ("TORUS_RUN_SECRET_FILE", None, None, "No such file or directory"),
    ],
)
def test_what_cannot_be_a_secret_is_one_line(elsewhere, tmp_path, variable, content, mode, message):
    value = content if variable == "TORUS_RUN_SECRET" else str(tmp_path / "file")
    if mode:
        write(tmp_path / "file", content, mode)
    with pytest.raises(ConfigError) as error:
        RunSecret({variable: value}, tmp_path, first=False)
    assert message in str(error.value) and GOOD not in str(error.value)


def test_a_secret_of_a_user_that_is_not_there_is_one_line():
    with pytest.raises(PathError, match=r"^~nobody_here/secret: this system has no user"):
        RunSecret({"TORUS_RUN_SECRET_FILE": "~nobody_here/secret"}, None, first=False)


def test_process_0_leaves_a_secret_in_the_folder_while_the_others_join(elsewhere, tmp_path):
    folder = tmp_path / "runs" / "mine"
    first, other = RunSecret({}, folder, first=True), RunSecret({}, folder, first=False)
    assert other.find() == Secret(FROM_FOLDER, b"")  # not there yet
    found = first.find()
    assert found == first.find() == other.find() and len(found.value) >= 32 and found.source == FROM_FOLDER
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    other.withdraw()
    assert file.exists()
    first.withdraw()
    first.withdraw()
    assert not folder.exists()  # as it was before: nothing was trained


def test_a_secret_that_an_earlier_start_has_left_is_not_used_again(elsewhere, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    left = RunSecret({}, tmp_path, first=True).find()
    again = RunSecret({}, tmp_path, first=True)
    assert again.find() != left and RunSecret({}, tmp_path, first=False).find() == again.find()
    again.withdraw()
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_that_cannot_be_written_is_one_line(elsewhere, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^--workdir=.*/file/run: Not a directory; .* or set TORUS_RUN_SECRET"):
        RunSecret({}, tmp_path / "file" / "run", first=True).find()


def test_a_secret_is_not_shown_with_the_object():
    assert GOOD not in repr(Secret("TORUS_RUN_SECRET", GOOD.encode()))


def test_a_metadata_server_that_says_no_http_has_none(monkeypatch):
    monkeypatch.setattr(secret, "METADATA_PAUSE_SECONDS", 0.01)
    with socket.create_server(("localhost", 0)) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", f"localhost:{server.getsockname()[1]}")

        def answer():
            for _ in range(secret.METADATA_TRIES):
                with server.accept()[0] as connection:
                    connection.recv(1000)
                    connection.sendall(b"\xff" * 70_000)

        threading.Thread(target=answer, daemon=True).start()
        assert secret.from_metadata() is None
