# SPDX-License-Identifier: Apache-2.0
"""Write files atomically: each is complete or absent."""

import contextlib
import os
import pathlib
import threading
from collections.abc import Iterator
from typing import BinaryIO


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Write a file in an existing folder; see `replacing`."""
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Open a file that appears at `path` when it is complete. Several processes and threads may write it.

    The last one wins. A link stays, and its file is written. A device such as /dev/null is written as it is.
    """
    if _is_special(path):
        with path.open("wb") as file:
            yield file
        return
    path = _without_link(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_native_id()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):  # the first error is the cause
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Open a file of any size that appears at `path` when it is complete and on disk. One writer at a time.

    An interrupted write leaves PATH.part, which the next write replaces. Links and devices are as in `replacing`.
    """
    if _is_special(path):
        with path.open("wb") as file:
            yield file
        return
    path = _without_link(path)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _is_special(path: pathlib.Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _without_link(path: pathlib.Path) -> pathlib.Path:
    return path.resolve() if path.is_symlink() else path
