# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of input_pipeline/chat/rendering.py, and sends them requests."""

import atexit
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 5.0  # limit of processor time for a line
MADE, BAD, REFUSED = b"M", b"B", b"R"  # the first byte of an answer; JSON, [kind, details], or a reason follows
DEATHS = {  # why a process ended, by the signal
    signal.SIGPROF: "it takes too much time", signal.SIGKILL: "it takes more memory than this machine has",
}  # fmt: skip
_idle: list["Renderer"] = []


class Died(Exception):
    """The process ended without an answer; the message says why."""


class Renderer:
    """A process that renders; it handles one request at a time."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "input_pipeline.chat.rendering"], cwd=ROOT, env={}, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def __del__(self):
        """End the process when no one waits for its answers any more."""
        self.end()

    @property
    def lives(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def ask(self, request: dict, lines: Sequence[bytes]) -> list[bytes]:
        """Send a request about lines, which have no line ends; return an answer for each. Raises Died."""
        header = json.dumps(request | {"count": len(lines), "seconds": SECONDS}).encode()
        with contextlib.suppress(BrokenPipeError):  # the process has died, which is reported below
            self._process.stdin.write(b"\n".join([header, *lines, b""]))
            self._process.stdin.flush()
        found = [self._process.stdout.readline() for _ in lines]
        if all(answer.endswith(b"\n") for answer in found):
            return [answer[:-1] for answer in found]
        status = self._process.wait()
        raise Died(DEATHS.get(-status, f"the process that renders it ended with status {status}"))

    def end(self) -> None:
        """End the process, even if it is busy."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()


def ask(request: dict, lines: Sequence[bytes]) -> list[bytes]:
    """Return the answers of an idle or a new process to a request about lines. Raises Died."""
    renderer = next((idle for idle in iter(_take, None) if idle.lives), None) or Renderer()
    answers = renderer.ask(request, lines)
    _idle.append(renderer)
    return answers


def _take() -> Renderer | None:
    try:
        return _idle.pop()
    except IndexError:  # a check before it would be a race with other threads
        return None


atexit.register(_idle.clear)
