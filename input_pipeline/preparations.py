# SPDX-License-Identifier: Apache-2.0
"""Remembers which shards were made of which files, so that a later start does not read unchanged files again.

A preparation is a file of the cache. Its name is a digest of everything that the shards depend on: the configuration,
the code, and the size, times and inode of every file. On a local disk no program can set the time of a file's last
change (st_ctime), so the same file with the same times has the same content, except if it was written to within the
resolution of the clock. Files that are so recent are read again.
"""

import contextlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from files.atomic import write_atomically
from files.folders import source_files
from files.json_reader import JsonError, Object, read_json
from input_pipeline.cache import digest, digest_of_json

RECENT_NS = 2_000_000_000  # since a file's last change: more than any file system's resolution of time
NOT_OF_SHARDS = "cache_dir", "readers", "prefetch", "path", "mixture", "stream"  # keys of the section
PACKAGES = "datasets", "jinja2", "pyarrow", "sentencepiece", "tensorflow", "tokenizers"  # that read or encode documents


class Preparation(Object):
    """What was made of some files."""

    tokenizer: str  # its digest
    shards: list[tuple[str, str]]  # of each part: the name of its folder, and the digest of its manifest
    notes: list[str]  # lines about the documents


def path_of(cache: Path, data: ConfigDict, files: Sequence[Path], facts: Sequence) -> Path | None:
    """Return where the preparation of `files` is kept in a cache.

    `facts` are what the shards depend on besides the section `data`, in JSON types, among them the paths of the parts.
    The result is None if a file cannot be read, or changed so recently that a further change might not be seen.
    """
    try:
        states = [_state(path) for path in files]
    except OSError:
        return None
    if any(state.st_ctime_ns > time.time_ns() - RECENT_NS for state in states):
        return None
    section = {key: value for key, value in data.to_dict().items() if key not in NOT_OF_SHARDS}
    seen = [
        (str(path.absolute()), state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        for path, state in zip(files, states, strict=True)
    ]
    return cache / "preparations" / f"{digest_of_json([section, facts, CODE, seen])}.json"


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
        write_atomically(path, json.dumps(preparation).encode())


def _state(path: Path) -> os.stat_result:
    """Return the status of a file; it is opened, since a network file system then asks its server."""
    with path.open("rb", buffering=0) as file:
        return os.fstat(file.fileno())


def _digest_of_code() -> str:
    """Return a digest of what reads files, which another version may do differently: our code, and libraries."""
    root = Path(__file__).parent.parent
    sources = [*source_files(root / "input_pipeline"), *source_files(root / "files")]
    ours = [(str(path.relative_to(root)), digest(path.read_bytes())) for path in sources]
    return digest_of_json([sys.version, ours, list(map(_version_of, PACKAGES))])


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # an extra
        return ""


CODE = _digest_of_code()  # computed at once: files may be edited while the program runs
