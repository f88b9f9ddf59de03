# SPDX-License-Identifier: Apache-2.0
"""Who trains in a workdir: the names that runs leave there for each other, and the lease of a folder in a bucket.

A bucket has no lock that falls with its holder. There a run keeps `lock.json`, and writes it anew again and again; one
that is LEASE_SECONDS old, or is of a process of this machine that is no more, is taken over. How old it is the storage
says, by the date of its answer and the time when it stored the object: the hosts' clocks may be wrong. Each write names
the generation of the object that it replaces, so that of two runs that write at once the storage lets one through.
"""

import contextlib
import datetime
import email.utils
import json
import os
import socket
import threading
import time

from configs.base import ConfigError
from files.json_reader import JsonError, Object, parse_json
from parallelism import processes
from parallelism.hub import RunError
from training.clock import Repeated

NAME = "lock.json"
LEASE_SECONDS = 180.0
RENEW_SECONDS = 30.0
REQUEST_SECONDS = 15.0  # for which a request is tried, less than until the next one
LONGEST_NAME = 1024  # bytes of the JSON by which a run is named


class Holder(Object):
    """How a run is named."""

    host: str
    pid: int
    since: str


def this_run() -> Holder:
    """Return how this process is named to others that want the same workdir."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": clock(time.time())}


def named(run: Holder | None) -> str:
    """Return how a process that left its name is called; None: its name is not known."""
    return f"process {run['pid']} on {run['host']}" if run else "another process"


def trains(run: Holder | None, place) -> str:
    """Say who trains in a folder, and since when."""
    return f"{named(run)} has been training in {place}" + (f" since {run['since']}" if run else "")


def read_name(content: bytes | str) -> Holder | None:
    """Return the name that a run has left; None where it is none."""
    with contextlib.suppress(JsonError):
        return parse_json(content, Holder, NAME, max_bytes=LONGEST_NAME)


def clock(seconds: float) -> str:
    """Return a Unix time as it is shown."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(" ", "seconds")


@contextlib.contextmanager
def held(url: str | None):
    """Hold a folder of a bucket for this run until the end of the block; process 0 does so for all. None: no bucket.

    A lease that is lost raises RunError in a thread, whose excepthook is to end the process. Errors as of `claim`.
    """
    if url is None or processes.index() != 0:
        yield
        return
    lease = Lease(url)
    lease.claim()
    thread = Repeated("lease", lease.renew, RENEW_SECONDS)
    try:
        yield
    finally:
        thread.end()
        lease.release()


class Lease:
    """A run's right to write to a folder of a bucket."""

    def __init__(self, url: str):
        """`url`: gs://bucket/folder."""
        from google.cloud import storage  # only where there is a bucket: it takes a while to import
        from google.cloud.storage.retry import DEFAULT_RETRY

        self.url, self.run = url, this_run()
        self.using = threading.Lock()
        self.generation: int | None = None  # of the object that this run wrote
        self.patience = {"timeout": REQUEST_SECONDS, "retry": DEFAULT_RETRY.with_timeout(REQUEST_SECONDS)}
        bucket, _, folder = url.removeprefix("gs://").partition("/")
        self.blob = storage.Client().bucket(bucket).blob(f"{folder}/{NAME}")

    def claim(self) -> None:
        """Take the lease, unless another run holds it.

        Raises:
          RunError: names that run, and when its lease would be taken over.
          ConfigError: the bucket cannot be read or written.
        """
        from google.api_core.exceptions import Forbidden, NotFound, PreconditionFailed

        try:
            now = self._write_first()
            if now is not None:
                self._take_over(now)
        except PreconditionFailed:
            raise RunError(f"--workdir={self.url}: another run has begun there at this moment") from None
        except (Forbidden, NotFound):
            raise ConfigError(f"--workdir={self.url}: there is no such bucket, or no leave to write to it") from None
        except _failures() as error:
            raise ConfigError(f"--workdir={self.url}/{NAME}: {error}") from None

    def renew(self) -> None:
        """Say that this run goes on, at least every LEASE_SECONDS; where the bucket does not answer, the next one may.

        Raises RunError where another run has taken the lease over.
        """
        from google.api_core.exceptions import PreconditionFailed

        with self.using, contextlib.suppress(*_failures()):
            if self.generation is None:
                return
            try:
                self._write(self.generation)
            except PreconditionFailed:
                run, self.generation, _ = self._read()
                if run != self.run:
                    raise RunError(
                        f"--workdir={self.url}: {named(run)} has taken this run's place there; see which is to go on"
                    ) from None

    def release(self) -> None:
        """Give the lease back; where the bucket does not answer, it falls after LEASE_SECONDS."""
        with self.using, contextlib.suppress(*_failures()):
            generation, self.generation = self.generation, None
            self.blob.delete(if_generation_match=generation, **self.patience)

    def _write_first(self) -> float | None:
        """Take the lease where there is none, and return None; where there is one, return the storage's time."""
        from google.api_core.exceptions import PreconditionFailed

        try:
            self._write(0)
        except PreconditionFailed as refusal:
            return _date(refusal.response.headers.get("Date", ""))
        return None

    def _take_over(self, now: float) -> None:
        """Take the lease that is there at a time of the storage; RunError where it binds this run."""
        run, generation, written = self._read()
        if generation and now < written + LEASE_SECONDS and not _is_gone(run):
            raise RunError(
                f"{trains(run, self.url)}. Use another --workdir, or wait: its lease is "
                f"taken over at {clock(written + LEASE_SECONDS)} unless it is renewed until then"
            )
        self._write(generation)

    def _read(self) -> tuple[Holder | None, int, float]:
        """Return who holds the lease, the object's generation, and when it was stored; generation 0: nobody does."""
        from google.api_core.exceptions import NotFound

        newest = self.blob.bucket.blob(self.blob.name)  # what was written here is asked for by its generation
        try:
            newest.reload(**self.patience)
            too_long = newest.size > LONGEST_NAME
            content = (
                b"" if too_long else newest.download_as_bytes(if_generation_match=newest.generation, **self.patience)
            )
        except NotFound:
            return None, 0, 0.0
        return read_name(content), newest.generation, newest.time_created.timestamp()

    def _write(self, generation: int) -> None:
        """Put this run's name in place of that generation of the object; 0: of none."""
        content = json.dumps(self.run)
        self.blob.upload_from_string(content, "application/json", if_generation_match=generation, **self.patience)
        self.generation = self.blob.generation


def _is_gone(run: Holder | None) -> bool:
    """Return whether a run was a process of this machine that is no more; one with this one's number is no other."""
    if run is None or run["host"] != socket.gethostname():
        return False
    try:
        os.kill(run["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return run["pid"] == os.getpid()


def _date(text: str) -> float:
    """Return the Unix time that an answer of the storage has as its date."""
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except ValueError:
        raise ConfigError(f"the storage answers with the date {text!r}; whose lease there is cannot be told") from None


def _failures() -> tuple[type[Exception], ...]:
    """Return what is raised where Google's storage refuses or cannot be reached."""
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError

    return GoogleAPIError, GoogleAuthError, OSError
