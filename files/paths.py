# SPDX-License-Identifier: Apache-2.0
"""Paths as people type them."""

import os
import pathlib

LONGEST_NAME = 255  # bytes of a name, in the file systems of Linux and macOS
SHOWN_CHARACTERS = 60  # of a text in a message


class PathError(ValueError):
    """A path that no file can have here; one line says why."""

    exit_status = 2


def expanded(path: str | os.PathLike) -> pathlib.Path:
    """Return a path in which `~` is replaced by a home folder.

    Raises PathError if there is no such user, or if a name is too long for a file system, as after a missing quote.
    """
    shown = shortened(str(path))
    try:
        found = pathlib.Path(path).expanduser()
    except RuntimeError:
        raise PathError(f"{shown}: this system has no user with that home folder; name another path") from None
    if any(len(os.fsencode(name)) > LONGEST_NAME for name in found.parts):
        raise PathError(f"{shown}: a name in this path has over {LONGEST_NAME} bytes; is a quote missing?")
    return found


def shortened(text: str) -> str:
    """Return a text for a message: dots take the place of what exceeds SHOWN_CHARACTERS."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."
