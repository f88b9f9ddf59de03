# SPDX-License-Identifier: Apache-2.0
"""Remembers which shards were made of which files, so that a later start does not read unchanged files again.

A preparation is a file of the cache. Its name is a digest of everything that the shards depend on: the configuration,
the code of this package, and the size and times of every file. The time of a file's last change (st_ctime) cannot be
set by a program, so a file with the same times has the same content, except if it was written to within the resolution
of the clock. Files that are so recent are read again.
"""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from files.json_reader import JsonError, Object, read_json
from input_pipeline.cache import digest, digest_of_json, write_json

RECENT_NS = 2_000_000_000  # since a file's last change: more than any file system's resolution of time
NOT_OF_SHARDS = "cache_dir", "readers", "prefetch"  # keys of the section


class Preparation(Object):
    """What was made of some files."""

    tokenizer: str  # its digest
    shards: list[str]  # names of the folders, one for each part
    notes: list[str]  # lines about the documents


def path_of(cache: Path, data, files: Sequence[Path], facts: Sequence) -> Path | None:
    """Return where the preparation of `files` is kept in a cache.

    Args:
        data: the section of the configuration.
        facts: what the shards depend on besides, in JSON types.

    Returns:
        None if a file cannot be read, or changed so recently that a further change might not be seen.
    """
    try:
        states = [(str(path.absolute()), path.stat()) for path in files]
    except OSError:
        return None
    newest = max(max(state.st_ctime_ns, state.st_mtime_ns) for _, state in states)
    if newest > time.time_ns() - RECENT_NS:
        return None
    section = {key: value for key, value in data.to_dict().items() if key not in NOT_OF_SHARDS}
    seen = [(name, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for name, state in states]
    return cache / "preparations" / f"{digest_of_json([section, facts, _digest_of_code(), seen])}.json"


def read(path: Path) -> Preparation | None:
    """Return a preparation; None if there is none."""
    try:
        return read_json(path, Preparation)
    except (OSError, JsonError):
        return None


def keep(path: Path, preparation: Preparation) -> None:
    """Keep a preparation for later starts."""
    with contextlib.suppress(OSError):  # on a full disk, or in another user's cache, the next start reads the files
        path.parent.mkdir(exist_ok=True)
        write_json(path, preparation)


def _digest_of_code() -> str:
    """Return a digest of this package, which may read the same files differently in another version."""
    return digest(*(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))))
