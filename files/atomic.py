# SPDX-License-Identifier: Apache-2.0
"""Write a small file atomically: it is complete or absent."""

import os
import pathlib
import threading


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Write a file in an existing folder, whichever processes and threads write it too; the last one wins."""
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_native_id()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
