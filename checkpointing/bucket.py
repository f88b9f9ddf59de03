# SPDX-License-Identifier: Apache-2.0
"""A run's folder in a bucket: files are written to local disk and copied there.

Checkpoints are saved to `checkpoint.staging` first, see checkpointing/shared_folder.py.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import itertools
import logging
import os
import pathlib
import shutil
import threading
from collections.abc import Callable
from http import HTTPStatus

from cluster import compiled_programs
from cluster.hub import RunError
from configs.errors import ConfigError
from files.atomic import write_atomically, writing
from files.folders import names_in
from files.lock import is_held
from settings import stored_config
from settings.stored_config import SUMMARY

os.environ.setdefault("EPATH_USE_TF", "false")  # before the first path of a bucket: gcsfs, as elsewhere

GROWING = ("metrics.jsonl", "ledger.jsonl", "rollouts.jsonl")  # append-only
COMPARED_BYTES = 1 << 16
PIECE_BYTES = 64 << 20  # of a file that is read at once; rollouts may be larger than the memory
PASSING = (401, 408, 429)  # statuses of a store that answers otherwise later; a token expires after an hour
WHOLE = (  # copied in both directions, as the growing ones are
    *sorted(stored_config.OF_TOKENIZER), stored_config.CONFIG, "run.json", SUMMARY, "submission.json", "causes.html",
    "report.html", "profile.json", "rehearsal.json", "wandb_id.txt", "bad_documents.txt",
)  # fmt: skip
BY_STEP = {"votes": "*.gz"}  # folders of a file per step, which a repeated step overwrites


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A folder of a bucket, `url`, and its local copy."""

    url: str
    folder: pathlib.Path

    def fetch(self, *, keep_newer: bool = False, is_ours: bool = False) -> None:
        """Copy the run's small files from the bucket, as another host left them.

        A growing file is not fetched if the copy here continues that of the bucket: its last lines were not sent. The
        tokenizer and the summary are deleted here if the run in the bucket has none, and everything if the files
        here are another run's. If there is no run in the bucket, all that `_stale` names is deleted, unless
        `keep_newer`. Nothing is deleted while another process goes on with the run here.

        Args:
          keep_newer: whether files that were written here after those of the bucket stay; the run may go on here.
          is_ours: whether this process holds the run's lock.

        Raises:
          ConfigError: the bucket does not exist, or cannot be read.
          RunError: it does not answer, which may pass.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        store = path_of(self.url)
        with self._failing_in_a_line():
            _list_one(self.url)
            found = names_in(store)
            if is_ours or not is_held(self.folder / "lock"):  # one that goes on here may not have sent its files
                for name in self._stale(found, keep_newer=keep_newer):
                    (self.folder / name).unlink(missing_ok=True)
            by_step = [f"{folder}/{name}" for folder in BY_STEP for name in _matching(store / folder, BY_STEP[folder])]
            of_run = [name for name in (*GROWING, *WHOLE) if name in found]
            for name in (*of_run, *by_step):
                there, here = store / name, self.folder / name
                if name in GROWING:
                    is_newer = here.exists() and _continues(here, there)
                else:
                    is_newer = keep_newer and here.exists() and here.stat().st_mtime > there.stat().mtime
                if not is_newer:
                    _fetch_file(there, here)

    def fetch_log(self, log: pathlib.Path) -> None:
        """Copy a process's log from the bucket, so that its lines stay there if another host goes on with the run."""
        there = path_of(self.url) / log.relative_to(self.folder)
        with self._failing_in_a_line():
            if there.name not in names_in(there.parent) or (log.exists() and _continues(log, there)):
                return
            ours = log.read_bytes().splitlines(keepends=True) if log.exists() else []
            theirs = there.read_bytes().splitlines(keepends=True)
            both = len(list(itertools.takewhile(lambda lines: lines[0] == lines[1], zip(ours, theirs, strict=False))))
            with log.open("wb") as file:  # not replaced: it may be open to append
                file.writelines([*theirs, *ours[both:]])

    def _is_of_another_run(self) -> bool:
        """Return whether the files here are not of the run in the bucket: metrics have the time of the first start."""
        there, here = path_of(self.url) / GROWING[0], self.folder / GROWING[0]
        if not here.exists() or not there.exists():
            return False
        with here.open("rb") as ours, there.open("rb") as theirs:
            first, other = (file.read(COMPARED_BYTES).partition(b"\n")[:2] for file in (ours, theirs))
        return bool(first[1] and other[1]) and first != other

    def _stale(self, found: set[str], *, keep_newer: bool) -> list[str]:
        """Return the files here that are not of the run in the bucket, which has the files `found`."""
        is_other = self._is_of_another_run()
        if stored_config.CONFIG in found and not is_other:
            return [name for name in (*stored_config.OF_TOKENIZER, SUMMARY) if name not in found]
        if keep_newer and not is_other:  # a reader; the copy here may be the last one
            return []
        of_folders = [path for name in (*BY_STEP, "workers", "tensorboard") for path in (self.folder / name).rglob("*")]
        return [*GROWING, *WHOLE, *(str(path.relative_to(self.folder)) for path in of_folders if path.is_file())]

    def trained_to(self) -> int | None:
        """Return the step of `stored_config.trained_to`. Raises as `fetch`."""
        with self._failing_in_a_line():
            return stored_config.trained_to(path_of(self.url))

    def fetch_compiled(self) -> None:
        """Copy the run's compiled programs that are missing here; only process 0 of a run writes jax's cache."""
        there, here = (place / compiled_programs.FOLDER for place in (path_of(self.url), self.folder))
        with self._failing_in_a_line():
            entries = _matching(there, compiled_programs.ENTRIES)
            for name in (name for name in entries if not (here / name).exists()):
                here.mkdir(parents=True, exist_ok=True)
                write_atomically(here / name, (there / name).read_bytes())

    @contextlib.contextmanager
    def _failing_in_a_line(self):
        """Raise ConfigError or RunError with the address, as `kind_of` says, if the bucket fails in the block."""
        try:
            yield
        except failures_of(self.url) as error:
            raise kind_of(error)(f"--workdir={self.url}: {error}") from None

    def send(self, log: pathlib.Path, *, first: bool) -> None:
        """Copy a process's log to the bucket; if `first`, also the run's other files, which process 0 writes.

        Of files that grow, only what the bucket lacks is sent. Of files that are missing here, only the summary and
        those of another tokenizer are deleted there.
        """
        has_tokenizer = any((self.folder / name).exists() for name in stored_config.OF_TOKENIZER)
        outdated = {SUMMARY, *(stored_config.OF_TOKENIZER if has_tokenizer else ())}
        events = [path for path in (self.folder / "tensorboard").rglob("*") if path.is_file()]
        growing = [log, *(self.folder / name for name in GROWING), *events] if first else [log]
        whole = [*(self.folder / name for name in WHOLE), *self._new()] if first else []
        url = path_of(self.url)
        for path in filter(pathlib.Path.exists, growing):
            there = url / path.relative_to(self.folder)
            end = url / "unfinished" / hashlib.sha256(str(there).encode()).hexdigest()[:16]
            _send_growing(path, there, end)
        for path in whole:
            there = url / path.relative_to(self.folder)
            if path.exists():
                there.write_bytes(path.read_bytes())
            elif path.name in outdated:  # another file may have been lost here
                there.unlink(missing_ok=True)

    def _new(self) -> list[pathlib.Path]:
        """Return the compiled programs and the files of BY_STEP that the bucket lacks or holds with another length."""
        url, found = path_of(self.url), []
        for name, pattern in (BY_STEP | {compiled_programs.FOLDER: compiled_programs.ENTRIES}).items():
            for path in (self.folder / name).glob(pattern):
                there = url / name / path.name
                if not there.exists() or there.stat().length != path.stat().st_size:
                    found.append(path)
        return found


def _matching(folder, pattern: str) -> list[str]:
    """Return the names in a folder that match; `glob` of a bucket takes the folder's own name for a pattern, too."""
    return fnmatch.filter(names_in(folder), pattern)


def _list_one(url: str) -> None:
    """Ask the bucket for an object; ConfigError if there is no such bucket, and gcsfs's error if it refuses.

    gcsfs asks for the bucket itself. That takes a permission that a run does not need; without it, gcsfs does not find
    an empty bucket.
    """
    import fsspec

    if "://" not in url:
        return
    try:
        store, name = fsspec.core.url_to_fs(url)
        store.call("GET", "b/{}/o", name.partition("/")[0], maxResults=1, json_out=True)
    except FileNotFoundError:
        what = "the bucket does not exist, or you have no permission to list it"
        raise ConfigError(f"--workdir={url}: {what}") from None


def _fetch_file(there, here: pathlib.Path) -> None:
    here.parent.mkdir(exist_ok=True)
    written = there.stat().mtime
    with there.open("rb") as sent, writing(here, durable=False) as file:
        shutil.copyfileobj(sent, file, PIECE_BYTES)
    os.utime(here, (written, written))  # only what is written here has a time of this host's clock


def _continues(here: pathlib.Path, there) -> bool:
    """Return whether a growing file begins with its copy in the bucket; only the end of the copy is compared."""
    length = there.stat().length
    if here.stat().st_size < length:
        return False
    start = max(0, length - COMPARED_BYTES)  # lines have the time, so that other lines differ
    with here.open("rb") as ours, there.open("rb") as theirs:
        ours.seek(start)
        theirs.seek(start)
        return ours.read(length - start) == theirs.read(length - start)


def _send_growing(here: pathlib.Path, there, end) -> None:
    """Append to the copy in the bucket what a growing file has gained; send the whole file if that fails."""
    if not (there.exists() and _continues(here, there) and _append(here, there, end)):
        with here.open("rb") as file, there.open("wb") as copy:
            shutil.copyfileobj(file, copy, PIECE_BYTES)


def _append(here: pathlib.Path, there, end) -> bool:
    """Append the rest of a file to its copy; return whether the copy is complete now.

    A bucket cannot append, but it can join two objects: the copy, and `end`, which has the rest.
    """
    import fsspec

    store, name = fsspec.core.url_to_fs(str(there))
    with here.open("rb") as file:
        length = file.seek(there.stat().length)
        while piece := file.read(PIECE_BYTES):
            end.write_bytes(piece)
            _join(store, name, str(end))
            length += len(piece)
            if there.stat().length != length:
                return False
    return True


def _join(store, name: str, end: str) -> None:
    """Append the object `end` to another object, then delete `end`. If the bucket refuses, the other is unchanged.

    gcsfs repeats a request whose answer is lost. The generation lets it succeed once.
    https://docs.cloud.google.com/storage/docs/json_api/v1/objects/compose
    """
    from gcsfs.retry import HttpError

    (bucket, key, _), generation = store.split_path(name), store.info(name)["generation"]
    parts = [{"name": part} for part in (key, store.split_path(end)[1])]
    body = {"sourceObjects": parts, "destination": {"name": key, "bucket": bucket}}
    try:
        with contextlib.suppress(FileExistsError, ValueError):  # as gcsfs calls status 412, and some of status 400
            store.call("POST", "b/{}/o/{}/compose", bucket, key, ifGenerationMatch=generation, json=body)
    except HttpError as error:
        if error.code != HTTPStatus.BAD_REQUEST:  # such as a copy that was moved to another storage class
            raise
    finally:
        with contextlib.suppress(FileNotFoundError):  # removed already, if the request is repeated
            store.rm_file(end)


def syncing(bucket: Bucket | None, log: pathlib.Path, *, first: bool) -> Callable[[], None]:
    """Fetch the log, and the run's files if `first`; return a function that copies them to the bucket."""
    if bucket is None:
        return lambda: None
    if first:
        bucket.fetch(is_ours=True)
    bucket.fetch_log(log)
    sending = threading.Lock()  # the thread of a save and the end of the run may both send

    def send() -> None:
        with sending:
            bucket.send(log, first=first)

    return send


def open_bucket(workdir: str, cache: pathlib.Path) -> Bucket | None:
    """Return the bucket folder that --workdir names, with its local copy in the cache; None for a local folder."""
    if not workdir.startswith("gs://"):
        return None
    url = workdir.rstrip("/")
    if not workdir.removeprefix("gs://").partition("/")[0]:
        raise ConfigError(f"{workdir} names no bucket; write gs://BUCKET/FOLDER")
    return Bucket(url, cache / "workdirs" / copy_name(url))


def copy_name(url: str) -> str:
    """Return a unique relative path for the local copy of a workdir or of a part of it; it ends as the address does.

    So code that names a run by its folder and the one above gives the same name for a bucket.
    """
    url = url.rstrip("/")
    last = [part if part.strip(".") else "_" for part in url.rpartition("://")[2].split("/")[-2:]]
    return "/".join([hashlib.sha256(url.encode()).hexdigest()[:12], *last])


def failures_of_buckets() -> tuple:
    """Return the exceptions of gcsfs besides OSError, and silence its log; imported late, since it is slow."""
    from aiohttp import ClientError
    from gcsfs.retry import ChecksumError, HttpError
    from google.auth.exceptions import GoogleAuthError

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    return ClientError, ChecksumError, HttpError, GoogleAuthError


def failures_of(address: str) -> tuple:
    """Return the exceptions of reading and writing a local folder, or one of a bucket, for an `except`."""
    return (OSError, *failures_of_buckets()) if "://" in address else (OSError,)


def kind_of(error: Exception) -> type[ConfigError | RunError]:
    """Return ConfigError for an error that the user must fix, and RunError for one that may pass, such as an outage."""
    from gcsfs.retry import HttpError
    from google.auth.exceptions import DefaultCredentialsError, RefreshError

    match error:
        case FileNotFoundError() | NotADirectoryError() | PermissionError() | DefaultCredentialsError():
            return ConfigError
        case RefreshError():
            return RunError if error.retryable else ConfigError
        case HttpError():
            return ConfigError if 400 <= (error.code or 0) < 500 and error.code not in PASSING else RunError
    return ConfigError if str(error).startswith("Forbidden") else RunError  # as gcsfs says it


def path_of(name: str):
    """Return the path of an address in a bucket, or of a local folder."""
    from etils import epath  # imported only when needed, because the import is slow

    if "://" in str(name):
        _list_each_time()
    return epath.Path(name)


@functools.cache
def _list_each_time() -> None:
    """Let gcsfs list a folder again each time; by default it keeps a listing for ever, and other hosts write too."""
    from fsspec import config

    config.conf.setdefault("gs", {}).setdefault("use_listings_cache", False)
