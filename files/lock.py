# SPDX-License-Identifier: Apache-2.0
"""Asks whether a process holds the lock of a file."""

import fcntl
import pathlib


def is_held(lock: pathlib.Path) -> bool:
    """Return whether a process holds the lock; False if there is no such file."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
