# SPDX-License-Identifier: Apache-2.0
"""JSON cache files with a digest of their content, so that a damaged file is detected and made again."""

import json
import pathlib

from checkpointing.manifest import digest_of
from files.atomic import write_atomically
from files.json_reader import JsonError, Object, read_json

MAX_BYTES = 256 << 20  # of the timelines of a large program


class Sealed(Object):
    """The schema of such a file."""

    sha256: str
    content: dict[str, object]


def write(path: pathlib.Path, content: dict) -> None:
    """Write a file atomically."""
    write_atomically(path, json.dumps({"sha256": digest_of(content), "content": content}).encode())


def read(path: pathlib.Path) -> dict | None:
    """Return the content of a file; None if it is missing or damaged."""
    try:
        sealed = read_json(path, Sealed, max_bytes=MAX_BYTES)
    except (OSError, JsonError):
        return None
    return sealed["content"] if sealed["sha256"] == digest_of(sealed["content"]) else None
