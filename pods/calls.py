# SPDX-License-Identifier: Apache-2.0
"""Calls programs of this machine, such as gcloud: with live output, and with retries after a transient failure."""

import contextlib
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TextIO

from pods.errors import PodError
from pods.settings import Settings
from pods.transports import Result

PERMANENT = re.compile(  # messages of failures that a retry does not fix
    r"permission|denied|forbidden|unauthenticated|not[_ ](?:be )?found|already[_ ]exists|invalid[_ ]argument"
    r"|no more capacity|quota(?!.*per minute)",
    re.IGNORECASE,
)
TRANSIENT = re.compile(
    r"\b(?:429|500|502|503|504)\b|too many requests|rate ?limit|per minute|unavailable|internal error|\bINTERNAL\b"
    r"|deadline[_ ]exceeded|timed? ?out|connection (?:refused|reset|aborted|closed)|network is unreachable"
    r"|name resolution|could not resolve|unable to find the server|kex_exchange",
    re.IGNORECASE,
)
SSH_FAILED = 255  # ssh's own status, for a host that it did not reach or has lost
_running: set[subprocess.Popen] = set()
_ending = threading.Event()


def call(
    settings: Settings, argv: list[str], *, show: bool = False, remote: bool = False, limit_s: float | None = None
) -> Result:
    """Run a program and return its result; with --dry_run only print the call. Only a failed result has stderr.

    Args:
      show: whether to display its output as it comes.
      remote: whether it runs a command on a host, whose status and output are not gcloud's. Then only failures of
        gcloud itself are retried: it tries ten times to reach a host, and a lost connection may have run the command.
      limit_s: seconds after which the program is killed, and the host counts as not reached.

    Raises:
      PodError: the program is not installed.
    """
    if settings.dry_run:
        print(shlex.join(argv), flush=True)
        return Result(None, 0)
    if shutil.which(argv[0]) is None:
        raise PodError(f"{argv[0]} is not installed here; see https://cloud.google.com/sdk/docs/install")
    for attempt in range(settings.retries + 1):
        result = _run(argv, show, limit_s)
        if _ending.is_set() or attempt == settings.retries or not _may_be_transient(result, remote):
            break
        pause = settings.retry_seconds * 2**attempt * random.uniform(0.75, 1.25)
        what = " ".join(word for word in argv[:5] if not word.startswith("-"))
        retry = f"retry {attempt + 1} of {settings.retries} in {pause:.0f} s"
        print(f"{what}: {result.message}; {retry}", file=sys.stderr, flush=True)
        if _ending.wait(pause):
            break
    return result


@contextlib.contextmanager
def ended() -> Iterator[None]:
    """End the calls of all threads, and repeat none of them within the block."""
    _ending.set()
    for process in list(_running):
        process.terminate()
    try:
        yield
    finally:
        _ending.clear()


def note(settings: Settings, line: str) -> None:
    """Print a line; in a dry run as a comment among the printed calls."""
    print(f"# {line}" if settings.dry_run else line, flush=True)


def _may_be_transient(result: Result, remote: bool) -> bool:
    """Return whether a call failed for a reason that may pass."""
    if result.status == 0 or (remote and (result.status == SSH_FAILED or "ERROR: (gcloud." not in result.output)):
        return False
    return not PERMANENT.search(result.message) and bool(TRANSIENT.search(result.message))


def no_answer(worker: int | None, limit_s: float) -> Result:
    """Return the result of a worker that did not answer in time, for example because one of its disks hangs."""
    return Result(worker, SSH_FAILED, f"no answer within {limit_s:.0f} s")


def _run(argv: list[str], show: bool, limit_s: float | None) -> Result:
    """Run a program and read both of its outputs concurrently."""
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=limit_s is not None,  # so that the ssh of gcloud can be killed with it
    )  # fmt: skip
    stdout, stderr = [], []
    readers = [
        threading.Thread(target=_read, args=(process.stdout, stdout, sys.stdout if show else None), daemon=True),
        threading.Thread(target=_read, args=(process.stderr, stderr, sys.stderr if show else None), daemon=True),
    ]
    for reader in readers:
        reader.start()
    _running.add(process)
    try:
        if _ending.is_set():
            process.terminate()
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        kill_groups([process])
        process.wait()
        return no_answer(None, limit_s)
    except KeyboardInterrupt:
        process.terminate()  # do not join the readers: child processes may hold the pipes open
        raise
    finally:
        _running.discard(process)
    for reader in readers if not _ending.is_set() else ():
        reader.join()
    if show:
        sys.stdout.flush()  # raises BrokenPipeError here, as in the reader thread, if nobody reads our output
    return Result(None, status, "".join(stdout + stderr if status else stdout))


def kill_groups(processes: Iterable[subprocess.Popen]) -> None:
    """Kill the process groups of the processes that still run."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _read(stream: TextIO, lines: list[str], display: TextIO | None) -> None:
    """Keep each line, and display it as it comes; close the stream once nobody reads the display."""
    with stream, contextlib.suppress(BrokenPipeError):
        for line in stream:
            lines.append(line)
            if display:
                display.write(line)
                display.flush()
