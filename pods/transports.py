# SPDX-License-Identifier: Apache-2.0
"""The interface to a pod. pods/gcloud.py implements it with gcloud, pods/local.py with processes of this machine.

Both run the same shell commands (pods/hosts.py), so tests run locally what ssh would run on a host.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Protocol

from pods.errors import PodError

GCLOUD_ERROR = re.compile(r"ERROR: (?:\(gcloud\.[\w.-]+\) |(?=gcloud crashed))")
LONGEST = 400  # characters of a message


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a command: its exit status and output; `worker` is None if several workers share one result.

    After success `output` may be only stdout, because gcloud writes its own messages to stderr.
    """

    worker: int | None
    status: int
    output: str = ""

    @property
    def message(self) -> str:
        """The error in one line: gcloud's own error, else the last line of output."""
        *_, text = GCLOUD_ERROR.split(self.output)
        if text == self.output:
            text = ["", *filter(str.strip, text.splitlines())][-1].removeprefix("error: ")
        return " ".join(text.split())[:LONGEST] or f"exit status {self.status}"


def expect_success(results: Iterable[Result], what: str) -> None:
    """Raise PodError if some failed, with the failed workers, the action and the first message."""
    if failed := [result for result in results if result.status]:
        numbers = [str(result.worker) for result in failed if result.worker is not None]
        who = f"worker{'s' * (len(numbers) > 1)} {', '.join(numbers)} " if numbers else ""
        raise PodError(f"{who}could not {what} (exit status {failed[0].status}): {failed[0].message}")


@dataclasses.dataclass(frozen=True)
class Deletion:
    """The result of `Transport.delete`: a line that reports it, and whether there was a pod."""

    line: str
    existed: bool = True


class Transport(Protocol):
    """A connection to a pod. Every method raises a one-line PodError if the pod cannot be reached at all."""

    @property
    def num_workers(self) -> int:
        """The number of hosts of the pod."""

    def describe(self) -> dict | None:
        """Return {"state", "health", "acceleratorType", "workers", ...}, or None if there is no such pod."""

    def found(self) -> dict:
        """Return the description of the pod; PodError if there is no such pod."""

    def versions(self) -> None:
        """Display the software versions and the accelerators that a pod can have."""

    def create(self) -> str:
        """Create the pod unless it exists already; return a line that reports it."""

    def wait(self) -> str:
        """Wait until the pod can be used; return a line that reports it."""

    def delete(self) -> Deletion:
        """Delete the pod if it exists."""

    def put_code(self) -> None:
        """Install the current commit and its packages on every worker, or update them."""

    def run(
        self, command: str, *, worker: str = "all", show: bool = True, output_directory: str = "",
        together: bool = True,
    ) -> list[Result]:  # fmt: skip
        """Run a shell command in the home folder of the given workers: "all", "0", "0-3" or "0,2".

        With `show` its output is displayed as it comes. With `output_directory` each worker's output is written to
        a file WORKER.log there.

        `together`: whether the commands may wait for each other, so that all have to run at once.
        """

    def run_each(self, command: str, *, together: bool = False, limit_s: float | None = None) -> list[Result]:
        """Run a command with one silent call for each worker, so that an unreachable worker does not hide others.

        Args:
          together: whether the commands wait for each other, so that all have to run at once.
          limit_s: seconds after which a worker that has not answered is unreachable; None: wait for ever.
        """

    def copy(self, source: str, target: str, *, worker: str = "all", recurse: bool = True) -> None:
        """Copy between this machine and the workers, whose paths are NAME:PATH; PodError if it fails."""
