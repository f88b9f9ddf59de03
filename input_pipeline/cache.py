# SPDX-License-Identifier: Apache-2.0
"""Keeps files between runs: their folder, digests that name them, and locks between processes."""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from files.atomic import writing
from files.paths import expanded
from input_pipeline.errors import DataError


def digest(*contents: bytes) -> str:
    """Return a digest of the concatenated bytes, to name results that depend on them."""
    return hashlib.blake2b(b"".join(contents), digest_size=16).hexdigest()


def digest_of_json(value) -> str:
    """Return a digest of a JSON-serialisable value that does not depend on the order of keys."""
    return digest(json.dumps(value, sort_keys=True).encode())


def cache_path(cache_dir: str) -> Path:
    """Return the folder that data.cache_dir names; '' is $XDG_CACHE_HOME/torus, else ~/.cache/torus.

    Raises PathError if the name begins with ~ and there is no such user, DataError if this user has no home folder.
    """
    if cache_dir:
        return expanded(cache_dir)
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "torus"
    try:
        return default.expanduser()
    except RuntimeError:
        raise DataError(
            f"{default}: this user has no home folder; set XDG_CACHE_HOME to a folder that can be written"
        ) from None


def cache_folder(cache_dir: str) -> Path:
    """Return the folder that data.cache_dir names; create it if missing. Raises DataError if it cannot be written."""
    folder = cache_path(cache_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"data.cache_dir={folder}: {error.strerror}; name a writable folder with --config.data.cache_dir"
        ) from error
    if not os.access(folder, os.W_OK):
        raise DataError(f"data.cache_dir={folder} is not writable; name a writable folder with --config.data.cache_dir")
    return folder


def write_json(path: Path, value) -> None:
    """Write a JSON-serialisable value atomically."""
    with writing(path) as file:
        file.write(json.dumps(value).encode())


@contextmanager
def locked(path: Path, announce: Callable[[str], object]) -> Iterator[None]:
    """Hold the lock file `path`, across processes; the lock is released when its process ends.

    Raises:
        DataError: the block, or the lock itself, cannot write to the cache: a full disk, or files of another user.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _open_lock(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                announce(f"waiting for another process, which is preparing {path.with_suffix('')}")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except BrokenPipeError:  # the output is closed; the cache is fine
        raise
    except OSError as error:
        where, why = error.filename or path.with_suffix(""), error.strerror or error
        raise DataError(
            f"{where}: {why}; the cache must be writable, on a disk with free space; name another with "
            "--config.data.cache_dir"
        ) from error


def _open_lock(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except PermissionError:
        if not path.exists():
            raise
        return path.open("rb")  # another user's cache: its finished files can be read
