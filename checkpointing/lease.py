# SPDX-License-Identifier: Apache-2.0
"""The lease of a bucket folder, so that only one run trains there, and the names by which runs find each other.

A bucket has no lock that ends with its holder's process. So a run writes `lock.json` there and renews it periodically.
Another run takes the lease over if it is LEASE_SECONDS old, or if its holder was a process of this machine that has
ended. The storage's clock decides the age, from the date of its answer and the object's creation time, because the
hosts' clocks may be wrong. Each write names the generation of the object that it replaces, so that the storage accepts
only one of two concurrent writes.
"""

import contextlib
import datetime
import email.utils
import json
import os
import socket
import threading
import time

from cluster import processes
from cluster.hub import RunError
from configs.errors import ConfigError
from files.json_reader import JsonError, Object, parse_json
from reporting.clock import Repeated

NAME = "lock.json"
LEASE_SECONDS = 180.0
RENEW_SECONDS = 30.0
REQUEST_SECONDS = 15.0  # timeout of a request with its retries, less than RENEW_SECONDS
LONGEST_NAME = 1024  # bytes of lock.json


class Holder(Object):
    """The name of a run: its process and the start of its training, as text in UTC."""

    host: str
    pid: int
    since: str


def this_run() -> Holder:
    """Return this process's name, for other runs that want the same workdir."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": clock(time.time())}


def named(run: Holder | None) -> str:
    """Return the words for a run in messages; None if its name is not known."""
    return f"process {run['pid']} on {run['host']}" if run else "another process"


def trains(run: Holder | None, place) -> str:
    """Return a sentence that says which run trains in a folder, and since when."""
    return f"{named(run)} has been training in {place}" + (f" since {run['since']}" if run else "")


def read_name(content: bytes | str) -> Holder | None:
    """Return the name of a run from JSON; None if the content is not valid."""
    with contextlib.suppress(JsonError):
        return parse_json(content, Holder, NAME, max_bytes=LONGEST_NAME)


def clock(seconds: float) -> str:
    """Return a Unix time as text in UTC."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(" ", "seconds")


@contextlib.contextmanager
def held(url: str | None):
    """Hold the lease of a bucket folder during the block; process 0 holds it for all. `url` is None without a bucket.

    If the lease is lost, a thread raises RunError; its excepthook must end the process. Raises the errors of `claim`.
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
        """Prepare the lease of a bucket folder, without a request; `url` is gs://bucket/folder."""
        from google.cloud import storage  # imported only for buckets, because the import is slow
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
          RunError: another run holds it; the message names the run and the end of its lease.
          ConfigError: the bucket cannot be read or written.
        """
        from google.api_core.exceptions import Forbidden, NotFound, PreconditionFailed

        try:
            now = self._write_first()
            if now is not None:
                self._take_over(now)
        except PreconditionFailed:
            raise RunError(f"--workdir={self.url}: another run started there at the same moment") from None
        except (Forbidden, NotFound):
            raise ConfigError(
                f"--workdir={self.url}: the bucket does not exist, or you have no permission to write to it"
            ) from None
        except _failures() as error:
            raise ConfigError(f"--workdir={self.url}/{NAME}: {error}") from None

    def renew(self) -> None:
        """Renew the lease; call this more often than every LEASE_SECONDS. Failed requests are left to the next call.

        Raises RunError if another run has taken the lease over.
        """
        from google.api_core.exceptions import PreconditionFailed

        with self.using, contextlib.suppress(*_failures()):
            if self.generation is None:
                return
            try:
                self._write(self.generation)
            except PreconditionFailed:
                run, generation, _ = self._read()
                self.generation = generation if run == self.run else None  # else `release` would end another's lease
                if run != self.run:
                    what = f"{named(run)} has taken over this run's lease; decide which continues"
                    gone = f"somebody has deleted {NAME}, this run's lease; start the run again"
                    raise RunError(f"--workdir={self.url}: {what if generation else gone}") from None

    def release(self) -> None:
        """Release the lease; if the bucket does not answer, the lease expires after LEASE_SECONDS."""
        with self.using, contextlib.suppress(*_failures()):
            generation, self.generation = self.generation, None
            if generation is not None:
                self.blob.delete(if_generation_match=generation, **self.patience)

    def _write_first(self) -> float | None:
        """Take the lease and return None if nobody holds one; otherwise return the storage's time (Unix seconds)."""
        from google.api_core.exceptions import PreconditionFailed

        try:
            self._write(0)
        except PreconditionFailed as refusal:
            return _date(refusal.response.headers.get("Date", ""))
        return None

    def _take_over(self, now: float) -> None:
        """Take over the existing lease if it has expired by the storage's time `now`; RunError if it is still valid."""
        run, generation, written = self._read()
        if generation and now < written + LEASE_SECONDS and not _is_gone(run):
            raise RunError(
                f"{trains(run, self.url)}. Use another --workdir, or wait: its lease is "
                f"taken over at {clock(written + LEASE_SECONDS)} unless it is renewed until then"
            )
        self._write(generation)

    def _read(self) -> tuple[Holder | None, int, float]:
        """Return the holder, the object's generation and its creation time; generation 0 if there is no lease."""
        from google.api_core.exceptions import NotFound

        newest = self.blob.bucket.blob(self.blob.name)  # self.blob would ask for the generation that it wrote
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
        """Write this run's name, if the object still has this generation; 0 means that it must not exist."""
        content = json.dumps(self.run)
        self.blob.upload_from_string(content, "application/json", if_generation_match=generation, **self.patience)
        self.generation = self.blob.generation


def _is_gone(run: Holder | None) -> bool:
    """Return whether a run was a process of this machine that has ended; its pid may now be this process's own."""
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
    """Return the Unix time of the Date header of the storage's answer."""
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except ValueError:
        raise ConfigError(f"the storage answers with the date {text!r}, so the age of the lease is unknown") from None


def _failures() -> tuple[type[Exception], ...]:
    """Return the exceptions that are raised if Google's storage refuses a request or cannot be reached."""
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError

    return GoogleAPIError, GoogleAuthError, OSError
