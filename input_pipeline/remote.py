# SPDX-License-Identifier: Apache-2.0
"""Documents that lie elsewhere, gs:// or any other store that fsspec knows, copied to this host's disk before training.

A copy is `<cache>/remote/<digest of the URL>/`: `files/` has whole files under the names of the store, `parts/` what
has come of the others, and `listing.json` what the store said of each, so that a changed one is copied anew.
"""

import glob
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from files.json_reader import Count, JsonError, read_json
from input_pipeline.cache import digest, locked, write_json
from input_pipeline.errors import DataError
from input_pipeline.progress import progress
from input_pipeline.threads import in_threads

PIECE_BYTES = 16 << 20  # of a request
STREAMS = 8  # requests at a time; as many pieces are held in memory
LONGEST_NAME = 255  # of a file on a disk, in bytes
LISTING_BYTES = 1 << 30  # of listing.json: a hundred for each file
MARKS = ("generation", "ETag", "etag", "mtime", "LastModified")  # what tells one content from another, by the store


class RemoteFile(NamedTuple):
    """A file in the store: `name` below the place that the URL names, `address` of the store's own, `size` in bytes."""

    name: str
    address: str
    size: int
    mark: str  # another one is another content; "" where the store gives none
    pin: dict[str, str]  # asks the store for this content and no later one


def is_url(path: str) -> bool:
    """Return whether a path is one of a store, such as gs://bucket/folder or file:///folder."""
    return re.match(r"[a-z][a-z0-9+.-]*://", path) is not None


def fetch(url: str, cache: Path, announce: Callable[[str], object] = print) -> str:
    """Copy what a URL names to local disk and return the path of the copy: a file, a folder or a glob, as the URL is.

    A file that is there with the store's size and mark is not copied again, and one that was begun goes on. Processes
    on one host wait for one another.

    Raises:
        DataError: no such store, bucket or file; no permission; the disk is full; the store fails.
    """
    store, root = _open(url)
    folder = cache / "remote" / digest(url.rstrip("/").encode())
    try:
        with locked(folder.with_suffix(".lock"), announce):
            files, below, is_glob = _list(store, root, url)
            _forget_changed(folder, files)
            missing = [file for file in files if not _is_whole(folder / "files" / file.name, file.size, announce)]
            if missing:
                _copy(store, url, folder, missing, announce)
    except OSError as error:
        raise DataError(f"{error.filename or folder}: {error.strerror}; a copy of {url} is kept there") from error
    copies = str(folder / "files")
    return os.path.join(glob.escape(copies) if is_glob else copies, below)


def _open(url: str):
    """Return the file system that fsspec has for a URL, and the path in it."""
    from fsspec.core import url_to_fs

    for library in ("gcsfs", "google.auth"):  # they log, with tracebacks, what they also raise
        logging.getLogger(library).setLevel(logging.CRITICAL)
    with _explained(url):
        try:
            store, root = url_to_fs(url)
        except ImportError as error:
            raise DataError(f"{url}: {error}, or use gs:// or a local path") from error
    store.invalidate_cache()
    return store, root.rstrip("/")


def _list(store, root: str, url: str) -> tuple[list[RemoteFile], str, bool]:
    """List the files that a URL names: one, all below a folder but hidden ones, or those that match.

    Returns:
        (files, what the URL names below the folder that they are in: a name, a pattern or "", whether a pattern).
    """
    with _explained(url):
        try:
            entries = store.find(root, detail=True)
            is_glob = not entries and glob.has_magic(root)
            if is_glob:
                entries = store.glob(root, detail=True)
        except FileNotFoundError as error:
            raise DataError(f"data path {url!r}: no such bucket, or none that this account may see") from error
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
        raise DataError(f"data path {url!r}: no file there, nor below it")
    return files, below, is_glob


def _remote_file(name: str, address: str, entry: dict, url: str) -> RemoteFile:
    if not _is_below(name):
        raise DataError(
            f"{url}: {address}: a name with '..' in it is not copied, nor one too long for a disk; rename it"
        )
    if entry["size"] is None:
        raise DataError(f"{url}: {address}: the store does not say how large it is; copy it to a local folder first")
    mark = next((f"{key}={entry[key]}" for key in MARKS if entry.get(key)), "")
    pin = {"generation": entry["generation"]} if "generation" in entry else {}
    return RemoteFile(name, address, entry["size"], mark, pin)


def _forget_changed(folder: Path, files: list[RemoteFile]) -> None:
    """Delete copies, whole or begun, of files that the store has no longer or has changed; keep the new listing."""
    path = folder / "listing.json"
    before = _listed(path)
    if before is None:
        before = {}
        for kind in ("files", "parts"):
            shutil.rmtree(folder / kind, ignore_errors=True)
    now = {file.name: [file.size, file.mark] for file in files}
    for name in before.keys() | now.keys():
        if before.get(name) != now.get(name):
            for kind in ("files", "parts"):
                (folder / kind / name).unlink(missing_ok=True)
    if before != now:
        folder.mkdir(exist_ok=True)
        write_json(path, now)


def _listed(path: Path) -> dict[str, list] | None:
    """Return what a listing says; None where it is missing or damaged, so that no copy can be believed."""
    try:
        found = read_json(path, dict[str, tuple[Count, str]], max_bytes=LISTING_BYTES)
    except (FileNotFoundError, JsonError):
        return None
    return {name: list(said) for name, said in found.items()} if all(map(_is_below, found)) else None


def _is_below(name: str) -> bool:
    """Return whether a name can be that of a file below the folder that it is looked for in."""
    path = PurePosixPath(name)
    fits = all(len(os.fsencode(part)) <= LONGEST_NAME for part in path.parts) and "\0" not in name
    return bool(path.parts) and fits and not path.is_absolute() and ".." not in path.parts


def _is_whole(path: Path, size: int, announce: Callable[[str], object]) -> bool:
    """Return whether a copy is there in its full size; one of another size, which nobody here wrote, is deleted."""
    if not path.exists():
        return False
    found = path.stat().st_size
    if found != size:
        announce(f"{path}: has {found:,} bytes where the store has {size:,}; it is copied again")
        path.unlink()
    return found == size


def _copy(store, url: str, folder: Path, missing: list[RemoteFile], announce: Callable[[str], object]) -> None:
    """Copy the files, from where an earlier copy ended, several pieces at a time but each file in its order."""
    pieces = [
        (file, start, min(start + PIECE_BYTES, file.size))
        for file in missing
        for start in range(_begun(folder, file), max(file.size, 1), PIECE_BYTES)
    ]
    needed = sum(stop - start for _, start, stop in pieces)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{url}: {needed:,} bytes are to be copied to {folder}, where {free:,} are free; "
            "make room, or name a larger disk with --config.data.cache_dir"
        )
    blocks = in_threads(lambda piece: _read(store, url, *piece), pieces, STREAMS)
    with progress(f"copying {url}", needed, announce) as advance, closing(blocks):
        for (file, start, _), block in zip(pieces, blocks, strict=True):
            _append(folder, file, start, block)
            advance(len(block))
    announce(f"{url}: copied {needed:,} bytes of {len(missing):,} files to {folder}")


def _begun(folder: Path, file: RemoteFile) -> int:
    """Return how many bytes of a file have come."""
    part = folder / "parts" / file.name
    found = part.stat().st_size if part.exists() else 0
    return found if found < file.size else 0


def _append(folder: Path, file: RemoteFile, start: int, block: bytes) -> None:
    """Write bytes of a file from `start` on; it gets its name when all of it is on disk."""
    whole, part = folder / "files" / file.name, folder / "parts" / file.name
    for path in (whole, part):
        path.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "ab") as output:
        output.truncate(start)
        output.write(block)
        output.flush()  # a killed process leaves whole pieces
        if output.tell() < file.size:
            return
        os.fsync(output.fileno())
    os.replace(part, whole)


def _read(store, url: str, file: RemoteFile, start: int, stop: int) -> bytes:
    """Return bytes start:stop of a file in the store. Raises DataError where it gives anything else."""
    if start == stop:  # of an empty file, of which stores refuse to give a range
        return b""
    with _explained(f"{url}: {file.address}"):
        try:
            block = store.cat_file(file.address, start=start, end=stop, **file.pin)
        except FileNotFoundError as error:
            raise DataError(f"{url}: {file.address}: changed or gone since it was listed; run again") from error
    if len(block) != stop - start:
        raise DataError(
            f"{url}: {file.address}: bytes {start:,} to {stop:,} came as {len(block):,} bytes; "
            "run again, or store it without Content-Encoding"
        )
    return block


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Say in one line what a store's libraries raise."""
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
    """Return what gcsfs raises beside OSError and ValueError."""
    import aiohttp
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError

    return HttpError, GoogleAuthError, aiohttp.ClientError
