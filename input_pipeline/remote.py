# SPDX-License-Identifier: Apache-2.0
"""Documents that lie elsewhere, gs:// or any other store that fsspec knows, copied to this host's disk before training.

A copy is `<cache>/remote/<digest of the URL>/`: `files/` has whole files under the names of the store, `parts/` what
has come of the others, and `listing.json` what the store said of each, so that a changed one is copied anew.
"""

import glob
import hashlib
import json
import logging
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from input_pipeline.cache import locked, writing
from input_pipeline.errors import DataError
from input_pipeline.progress import progress

PIECE_BYTES = 16 << 20  # of a request
STREAMS = 8  # requests at a time; as many pieces are held in memory
MARKS = ("generation", "ETag", "etag", "mtime", "LastModified")  # what tells one content from another, by the store


class RemoteFile(NamedTuple):
    """A file in the store: `name` below the place that the URL names, `address` of the store's own, `size` in bytes."""

    name: str
    address: str
    size: int
    mark: str  # another one is another content; "" where the store gives none
    pin: dict[str, str]  # asks the store for this content and no later one


class Listing(NamedTuple):
    """What a URL names: `files`; by `name` if it is one file, by `pattern` if a glob, by neither if a folder."""

    files: list[RemoteFile]
    name: str = ""
    pattern: str = ""


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
    folder = cache / "remote" / hashlib.blake2b(url.rstrip("/").encode(), digest_size=16).hexdigest()
    try:
        with locked(folder.with_suffix(".lock"), announce):
            listing = _list(store, root, url)
            _forget_changed(folder, listing.files)
            missing = [
                file for file in listing.files if not _is_whole(folder / "files" / file.name, file.size, announce)
            ]
            if missing:
                _copy(store, url, folder, missing, announce)
    except OSError as error:
        raise DataError(f"{error.filename or folder}: {error.strerror}; a copy of {url} is kept there") from error
    copies = str(folder / "files")
    return os.path.join(glob.escape(copies), listing.pattern) if listing.pattern else os.path.join(copies, listing.name)


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


def _list(store, root: str, url: str) -> Listing:
    """List the files that a URL names: one, all below a folder but hidden ones, or those that match."""
    with _explained(url):
        try:
            entries = store.find(root, detail=True)
            is_glob = not entries and glob.has_magic(root)
            if is_glob:
                entries = store.glob(root, detail=True)
        except FileNotFoundError as error:
            raise DataError(f"data path {url!r}: no such bucket, or none that this account may see") from error
    base, name, pattern = root, "", ""
    if is_glob:
        base = "/".join(takewhile(lambda part: not glob.has_magic(part), root.split("/")))
        pattern = root.removeprefix(base).lstrip("/")
    elif list(entries) == [root]:
        base, _, name = root.rpartition("/")
    files = [
        _remote_file(address.removeprefix(base).lstrip("/"), address, entry, url)
        for address, entry in sorted(entries.items())
        if entry["type"] == "file" and not address.endswith("/")  # stores show an empty folder as such a file
    ]
    files = [file for file in files if name or pattern or not _is_hidden(file.name)]
    if not files:
        raise DataError(f"data path {url!r}: no file there, nor below it")
    return Listing(files, name, pattern)


def _remote_file(name: str, address: str, entry: dict, url: str) -> RemoteFile:
    if ".." in PurePosixPath(name).parts:
        raise DataError(f"{url}: {address}: a name with '..' in it is not copied; rename it")
    if entry["size"] is None:
        raise DataError(f"{url}: {address}: the store does not say how large it is; copy it to a local folder first")
    mark = next((f"{key}={entry[key]}" for key in MARKS if entry.get(key)), "")
    pin = {"generation": entry["generation"]} if "generation" in entry else {}
    return RemoteFile(name, address, entry["size"], mark, pin)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts)


def _forget_changed(folder: Path, files: list[RemoteFile]) -> None:
    """Delete copies, whole or begun, of files that the store has no longer or has changed; keep the new listing."""
    path = folder / "listing.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    now = {file.name: [file.size, file.mark] for file in files}
    for name in before.keys() | now.keys():
        if before.get(name) != now.get(name):
            for kind in ("files", "parts"):
                (folder / kind / name).unlink(missing_ok=True)
    if before != now:
        folder.mkdir(exist_ok=True)
        with writing(path) as file:
            file.write(json.dumps(now, indent=1).encode())


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
    begun = {file.name: _begun(folder / "parts" / file.name, file.size) for file in missing}
    needed = sum(file.size - begun[file.name] for file in missing)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{url}: {needed:,} bytes are to be copied to {folder}, where {free:,} are free; "
            "make room, or name a larger disk with data.cache_dir"
        )
    pieces = (
        (file, start, min(start + PIECE_BYTES, file.size))
        for file in missing
        for start in range(begun[file.name], file.size, PIECE_BYTES)
    )
    with progress(f"copying {url}", needed, announce) as advance, ThreadPoolExecutor(STREAMS) as pool:
        blocks = _ahead(pool, partial(_read, store, url), pieces)
        for file in missing:
            _write(folder, file, begun[file.name], blocks, advance)
    announce(f"{url}: copied {needed:,} bytes of {len(missing):,} files to {folder}")


def _begun(part: Path, size: int) -> int:
    """Return how many bytes of a file have come."""
    found = part.stat().st_size if part.exists() else 0
    return found if found <= size else 0


def _write(folder: Path, file: RemoteFile, begun: int, blocks: Iterator[bytes], advance: Callable[[int], None]) -> None:
    """Append what is missing of a file, and give it its name when it is whole and on disk."""
    whole, part = folder / "files" / file.name, folder / "parts" / file.name
    for path in (whole, part):
        path.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "ab") as output:
        output.truncate(begun)
        while output.tell() < file.size:
            advance(output.write(next(blocks)))
            output.flush()  # a killed process leaves whole pieces
        os.fsync(output.fileno())
    os.replace(part, whole)


def _ahead(pool: ThreadPoolExecutor, read: Callable[..., bytes], pieces: Iterable[tuple]) -> Iterator[bytes]:
    """Yield what `read` gives for each piece, in their order, while the next ones are on their way."""
    pending = deque()
    for piece in pieces:
        pending.append(pool.submit(read, *piece))
        if len(pending) == STREAMS:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _read(store, url: str, file: RemoteFile, start: int, stop: int) -> bytes:
    """Return bytes start:stop of a file in the store. Raises DataError where it gives anything else."""
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
