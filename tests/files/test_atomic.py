# SPDX-License-Identifier: Apache-2.0
"""Files appear when they are complete; links and devices stay what they are."""

import errno
import os
import stat

import pytest

from files import atomic


def write_whole(path, content: bytes) -> None:
    """Write a file that is on disk when it appears."""
    with atomic.writing(path) as file:
        file.write(content)


WAYS = pytest.mark.parametrize("write", [atomic.write_atomically, write_whole])


@WAYS
def test_the_file_of_a_link_is_written_and_the_link_stays(tmp_path, write):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


@WAYS
def test_a_pipe_is_written_and_not_replaced(tmp_path, write):
    """As /dev/null and /dev/stdout, which root could replace."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(tmp_path / "pipe", b"content")
        assert os.read(reader, 100) == b"content" and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    finally:
        os.close(reader)


@pytest.mark.parametrize("durable", [True, False])
def test_a_write_that_fails_leaves_nothing_also_beside_the_file_of_a_link(tmp_path, durable):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(ValueError, match="wrong"), atomic.writing(tmp_path / "link", durable=durable) as file:
        file.write(b"new")
        raise ValueError("wrong")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]
    assert (tmp_path / "link").read_text() == "old"


def test_the_first_error_is_the_one_that_is_reported(tmp_path, monkeypatch):
    """On a disk that became read-only, the rest cannot be removed either."""

    def fail(path, *unused, **also_unused):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(atomic.pathlib.Path, "replace", fail)
    monkeypatch.setattr(atomic.pathlib.Path, "unlink", lambda *_, **__: fail("the rest"))
    with pytest.raises(OSError, match=r"file.*partial"):
        atomic.write_atomically(tmp_path / "file", b"content")


def test_a_full_disk_is_told_with_the_file(tmp_path):
    """An error of a write has no name of a file."""
    with pytest.raises(OSError) as told, atomic.writing(tmp_path / "file"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert told.value.filename == str(tmp_path / "file")
