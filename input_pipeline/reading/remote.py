# SPDX-License-Identifier: Apache-2.0
"""Copies remote documents, from gs:// or any other store that fsspec knows, to this host's disk before training.

A copy is `<cache>/remote/<digest of the URL>/`. `files/` has complete files under the names of the store, `parts/` has
incomplete files, and `listing.json` has the store's metadata of each file, so that a changed file is copied again.
"""

import glob
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from files.json_reader import Count, JsonError, read_json
from files.paths import LONGEST_NAME
from input_pipeline.cache import digest, locked, write_json
from input_pipeline.errors import DataError
from input_pipeline.progress import progress
from input_pipeline.threads import in_threads

PIECE_BYTES = 16 << 20  # of one request
STREAMS = 8  # concurrent requests; each holds one piece in memory
LISTING_BYTES = 1 << 30  # of listing.json, which has about a hundred for each file
MARKS = ("generation", "ETag", "etag", "mtime", "LastModified")  # metadata of stores that changes with the content


class RemoteFile(NamedTuple):
    """A file in the store: `name` relative to the URL, `address` in the store, `size` in bytes."""

    name: str
    address: str
    size: int
    mark: str  # it changes with the content; "" if the store gives none
    pin: dict[str, str]  # request options for exactly this version of the content


def is_url(path: str) -> bool:
    """Return whether a path is a URL of a store, such as gs://bucket/folder or file:///folder."""
    return re.match(r"[a-z][a-z0-9+.-]*://", path) is not None


def fetch(url: str, cache: Path, announce: Callable[[str], object] = print) -> str:
    """Copy the files of a URL to local disk and return the path of the copy: a file, a folder or a glob, as the URL.

    A local file with the store's size and mark is not copied again, and an incomplete copy resumes. Processes on one
    host wait for one another. Raises DataError if the store, bucket or file does not exist, permission is missing, the
    disk is full, or the store fails.
    """
    store, root = _open(url)
    folder = cache / "remote" / digest(url.rstrip("/").encode())
    with locked(folder.with_suffix(".lock"), announce):
        files, below, is_glob = _list(store, root, url)
        _forget_changed(folder, files)
        missing = [file for file in files if not _is_whole(folder / "files" / file.name, file.size, announce)]
        if missing:
            _copy(store, url, folder, missing, announce)
    copies = str(folder / "files")
    return os.path.join(glob.escape(copies) if is_glob else copies, below)


def _open(url: str):
    """Return fsspec's file system for a URL, and the path in it."""
    from fsspec.core import url_to_fs

    with _explained(url):
        try:
            store, root = url_to_fs(url)
        except TypeError:  # its constructor lacks an argument
            raise DataError(f"{url}: this store needs more than a URL; use gs:// or a local path") from None
        except ImportError as error:
            raise DataError(f"{url}: {error}, or use gs:// or a local path") from error
    store.invalidate_cache()
    return store, root.rstrip("/")


def _list(store, root: str, url: str) -> tuple[list[RemoteFile], str, bool]:
    """List the files of a URL: one file, all files below a folder except hidden ones, or those that match a glob.

    Returns:
        (files, the last part of the URL below their folder: a name, a pattern or "", whether it is a pattern).
    """
    with _explained(url):
        try:
            entries = store.find(root, detail=True)
            is_glob = not entries and glob.has_magic(root)
            if is_glob:
                entries = store.glob(root, detail=True)
            entries = {address: entry or store.info(address) for address, entry in entries.items()}
        except FileNotFoundError as error:
            raise DataError(f"data path {url!r}: no such bucket, or this account has no access to it") from error
    base = root
    if is_glob:
        base = "/".join(takewhile(lambda part: not glob.has_magic(part), root.split("/")))
    elif list(entries) == [root]:
        base = root.rpartition("/")[0]
    below = root.removeprefix(base).lstrip("/")
    files = [
        _remote_file(address.removeprefix(base).lstrip("/"), address, entry, url)
        for address, entry in sorted(entries.items())
        if entry["type"] == "file" and not address.endswith("/")  # stores show an empty folder as such a file
    ]
    files = [file for file in files if below or not re.search(r"(^|/)\.", file.name)]
    if not files:
        raise DataError(f"data path {url!r}: no file has this name, or is below it")
    return files, below, is_glob


def _remote_file(name: str, address: str, entry: dict, url: str) -> RemoteFile:
    if not _is_below(name):
        raise DataError(
            f"{url}: {address}: a name with '..', or too long for a file system, cannot be copied; rename it"
        )
    if entry["size"] is None:
        raise DataError(f"{url}: {address}: the store does not give its size; copy it to a local folder first")
    mark = next((f"{key}={entry[key]}" for key in MARKS if entry.get(key)), "")
    pin = {"generation": entry["generation"]} if "generation" in entry else {}
    return RemoteFile(name, address, entry["size"], mark, pin)


def _forget_changed(folder: Path, files: list[RemoteFile]) -> None:
    """Delete copies of files that the store has removed or changed, also incomplete ones; write the new listing."""
    path = folder / "listing.json"
    before = _listed(path)
    if before is None:
        before = {}
        for kind in ("files", "parts"):
            shutil.rmtree(folder / kind, ignore_errors=True)
    now = {file.name: [file.size, file.mark] for file in files}
    for name in before:
        if before[name] != now.get(name):
            for kind in ("files", "parts"):
                _delete(folder / kind / name)
    if before != now:
        folder.mkdir(exist_ok=True)
        write_json(path, now)


def _delete(path: Path) -> None:
    """Delete a copy, if there is one, and the folders that become empty: a new file may need the name of one."""
    path.unlink(missing_ok=True)
    with suppress(OSError):
        os.removedirs(path.parent)


def _listed(path: Path) -> dict[str, list] | None:
    """Return a listing; None if it is missing or damaged, so that no copy can be trusted."""
    try:
        found = read_json(path, dict[str, tuple[Count, str]], max_bytes=LISTING_BYTES)
    except (FileNotFoundError, JsonError):
        return None
    return {name: list(said) for name, said in found.items()} if all(map(_is_below, found)) else None


def _is_below(name: str) -> bool:
    """Return whether a name stays below its folder and can be a file's name."""
    path = PurePosixPath(name)
    fits = all(len(os.fsencode(part)) <= LONGEST_NAME for part in path.parts) and "\0" not in name
    return bool(path.parts) and fits and not path.is_absolute() and ".." not in path.parts


def _is_whole(path: Path, size: int, announce: Callable[[str], object]) -> bool:
    """Return whether a copy exists in full size; delete one of another size, which this program did not write."""
    if not path.exists():
        return False
    found = path.stat().st_size
    if found != size:
        announce(f"{path}: has {found:,} bytes where the store has {size:,}; it is copied again")
        path.unlink()
    return found == size


def _copy(store, url: str, folder: Path, missing: list[RemoteFile], announce: Callable[[str], object]) -> None:
    """Copy the files and resume earlier copies; pieces are fetched concurrently and written in order in each file."""
    pieces = [
        (file, start, min(start + PIECE_BYTES, file.size))
        for file in missing
        for start in range(_copied_bytes(folder, file), max(file.size, 1), PIECE_BYTES)
    ]
    needed = sum(stop - start for _, start, stop in pieces)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{url}: the copy takes {needed:,} bytes, and {folder} has {free:,} free; "
            "free some space, or name a folder on a larger disk with --config.data.cache_dir"
        )
    blocks = in_threads(lambda piece: _read(store, url, *piece), pieces, STREAMS)
    with progress(f"copying {url}", needed, announce) as advance, closing(blocks):
        for (file, start, _), block in zip(pieces, blocks, strict=True):
            _append(folder, file, start, block)
            advance(len(block))
    announce(f"{url}: copied {needed:,} bytes of {len(missing):,} files to {folder}")


def _copied_bytes(folder: Path, file: RemoteFile) -> int:
    """Return how many bytes of a file have been copied."""
    part = folder / "parts" / file.name
    found = part.stat().st_size if part.exists() else 0
    return found if found < file.size else 0


def _append(folder: Path, file: RemoteFile, start: int, block: bytes) -> None:
    """Write bytes of a file from `start` on; a complete file is moved to its final name."""
    whole, part = folder / "files" / file.name, folder / "parts" / file.name
    for path in (whole, part):
        path.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "ab") as output:
        output.truncate(start)
        output.write(block)
        output.flush()  # a killed process then leaves complete pieces
        if output.tell() < file.size:
            return
        os.fsync(output.fileno())
    os.replace(part, whole)


def _read(store, url: str, file: RemoteFile, start: int, stop: int) -> bytes:
    """Return bytes start:stop of a file in the store; DataError if the store returns another number of bytes."""
    if start == stop:  # an empty file; stores refuse a range of it
        return b""
    with _explained(f"{url}: {file.address}"):
        try:
            block = store.cat_file(file.address, start=start, end=stop, **file.pin)
        except FileNotFoundError as error:
            raise DataError(f"{url}: {file.address}: changed or gone since it was listed; run again") from error
    if len(block) != stop - start:
        raise DataError(
            f"{url}: {file.address}: the store returned {len(block):,} bytes for bytes {start:,} to {stop:,}; "
            "run again, or store it without Content-Encoding"
        )
    return block


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn exceptions of a store's libraries into a one-line DataError."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, *_errors_of_gcs()) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = ": ".join(said.split("\n")) or type(error).__name__
        denied = isinstance(error, PermissionError) or re.search(r"forbidden|\b40[13]\b|credentials", reason, re.I)
        advice = "; log in with `gcloud auth application-default login`, or let this account read it" if denied else ""
        raise DataError(f"{what}: {reason}{advice}") from error


def _errors_of_gcs() -> tuple[type[BaseException], ...]:
    """Return the exceptions that gcsfs raises in addition to OSError and ValueError."""
    import aiohttp
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError

    return HttpError, GoogleAuthError, aiohttp.ClientError
