# SPDX-License-Identifier: Apache-2.0
"""Write files atomically: each is complete or absent, and so is the last line of one that grows."""

import contextlib
import os
import pathlib
import threading
from collections.abc import Iterator
from typing import BinaryIO

BLOCK_BYTES = 1 << 16  # read at once to find the last line, where a run's rollouts may be hundreds of gigabytes


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Write a file in an existing folder; see `writing`, without `durable`."""
    with writing(path, durable=False) as file:
        file.write(content)


@contextlib.contextmanager
def opened(path: pathlib.Path, place: pathlib.Path) -> Iterator[BinaryIO]:
    """Open a file that is written; an OSError of a write, which names no file, names `place`."""
    try:
        with path.open("wb") as file:
            yield file
    except OSError as error:
        error.filename = error.filename or str(place)
        raise


@contextlib.contextmanager
def writing(path: pathlib.Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file that appears at `path` when it is complete. A link stays, and its file is written.

    A `durable` file is also on disk then, and has one writer at a time. A killed one leaves PATH.part, which the next
    write replaces. If any other file has several writers, the last one wins. A device such as /dev/null is written as
    it is.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with opened(path, path) as file:
            yield file
        return
    path = path.resolve() if path.is_symlink() else path
    ending = "part" if durable else f"{os.getpid()}-{threading.get_native_id()}.partial"
    partial = path.with_name(f"{path.name}.{ending}")
    try:
        with opened(partial, path) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):  # the first error is the cause
            partial.unlink(missing_ok=True)


def keep_whole_lines(file: BinaryIO) -> None:
    """Remove the last line of an open file, found from its end, if a killed process left it without an end."""
    end = file.seek(0, os.SEEK_END)
    place = -1
    while end and place < 0:
        begin = max(0, end - BLOCK_BYTES)
        file.seek(begin)
        place = file.read(end - begin).rfind(b"\n")
        end = begin + place + 1
    file.truncate(end)
