# SPDX-License-Identifier: Apache-2.0
"""Write files atomically: each is complete or absent."""

import contextlib
import os
import pathlib
import threading
from collections.abc import Iterator
from typing import BinaryIO


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Write a small file in an existing folder. Several processes and threads may write it; the last one wins."""
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_native_id()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Open a file of any size that appears at `path` when it is complete and on disk. One writer at a time.

    An interrupted write leaves PATH.part, which the next write replaces.
    """
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
