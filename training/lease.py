# SPDX-License-Identifier: Apache-2.0
"""Who trains in a workdir: the names that runs leave there for each other, and the lease of a folder in a bucket.

A bucket has no lock that falls with its holder. There a run keeps `lock.json`, and renews it; one that was not renewed
for LEASE_SECONDS, or is of a process of this machine that is no more, is taken over. Each write names the generation of
the object that it replaces, so that of two runs that write at once the storage lets one through.
"""

import contextlib
import datetime
import json
import os
import socket
import threading
import time

from configs.base import ConfigError
from parallelism import processes
from parallelism.hub import RunError
from training.clock import Repeated

NAME = "lock.json"
LEASE_SECONDS = 180.0
RENEW_SECONDS = 30.0
REQUEST_SECONDS = 15.0  # for which a request is tried, less than until the next one


def this_run() -> dict:
    """Return how this process is named to others that want the same workdir."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": clock(time.time())}


def named(run: dict | None) -> str:
    """Return the sentence's part for a run that left its name; None: a run that is known no better."""
    return f"process {run['pid']} on {run['host']}, since {run['since']}," if run else "another process"


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
            run, generation = self._read()
            if run and _is_up(run):
                raise RunError(
                    f"--workdir={self.url}: {named(run)} trains there; take another --workdir, or wait: its lease is "
                    f"taken over at {clock(run['renewed'] + LEASE_SECONDS)} unless it is renewed until then"
                )
            self._write(generation)
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
                run, self.generation = self._read()
                if not run or any(run[key] != self.run[key] for key in self.run):
                    raise RunError(
                        f"--workdir={self.url}: {named(run)} has taken this run's place there; see which is to go on"
                    ) from None

    def release(self) -> None:
        """Give the lease back; where the bucket does not answer, it falls after LEASE_SECONDS."""
        with self.using, contextlib.suppress(*_failures()):
            generation, self.generation = self.generation, None
            self.blob.delete(if_generation_match=generation, **self.patience)

    def _read(self) -> tuple[dict | None, int]:
        """Return who holds the lease, and the object's generation; (None, 0) where nobody does."""
        from google.api_core.exceptions import NotFound

        newest = self.blob.bucket.blob(self.blob.name)  # what was written here is asked for by its generation
        try:
            newest.reload(**self.patience)
            content = newest.download_as_bytes(if_generation_match=newest.generation, **self.patience)
        except NotFound:
            return None, 0
        return json.loads(content), newest.generation

    def _write(self, generation: int) -> None:
        """Put this run's name in place of that generation of the object; 0: of none."""
        content = json.dumps(self.run | {"renewed": time.time()})
        self.blob.upload_from_string(content, "application/json", if_generation_match=generation, **self.patience)
        self.generation = self.blob.generation


def _is_up(run: dict) -> bool:
    """Return whether a lease still binds others: it was renewed, and is of no process of this machine that is gone."""
    try:
        gone = run["host"] == socket.gethostname() and (run["pid"] == os.getpid() or os.kill(run["pid"], 0))
    except OSError as error:
        gone = isinstance(error, ProcessLookupError)
    return not gone and time.time() < run["renewed"] + LEASE_SECONDS


def _failures() -> tuple[type[Exception], ...]:
    """Return what is raised where Google's storage refuses or cannot be reached."""
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError

    return GoogleAPIError, GoogleAuthError, OSError
