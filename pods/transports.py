# SPDX-License-Identifier: Apache-2.0
"""What a pod can be asked: by gcloud (pods/gcloud.py), or of processes of this machine (pods/local.py).

Both run the same shell commands (pods/hosts.py), so that what the tests run here is what ssh would run there.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Protocol

from configs.base import shown

WORKERS = re.compile(
    r"all|[0-9]{1,9}(-[0-9]{1,9})?(,[0-9]{1,9})*"
)  # what --worker takes; gcloud knows no names of workers
GCLOUD_ERROR = re.compile(r"ERROR: (?:\(gcloud\.[\w.-]+\) |(?=gcloud crashed))")
LONGEST = 400  # characters of a message


class PodError(Exception):
    """What ends a subcommand, in one line; `exit_status` is 2 where nothing was called, else 1."""

    def __init__(self, message: str, exit_status: int = 1):
        super().__init__(" ".join(message.split()))
        self.exit_status = exit_status


def usage_error(message: str) -> PodError:
    """Return the error of a mistake in what was typed: status 2, and nothing was called."""
    return PodError(message, exit_status=2)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a command did: `worker` None where several workers gave one answer; `output` is what it said.

    Where it succeeded that may be stdout alone, since gcloud's own words are on stderr.
    """

    worker: int | None
    status: int
    output: str = ""

    @property
    def message(self) -> str:
        """What went wrong, in one line: gcloud's own error, else the last line said."""
        *_, text = GCLOUD_ERROR.split(self.output)
        if text == self.output:
            text = ["", *filter(str.strip, text.splitlines())][-1].removeprefix("error: ")
        return " ".join(text.split())[:LONGEST] or f"exit status {self.status}"


def expect_success(results: Iterable[Result], what: str) -> None:
    """Raise PodError where some failed: which workers could not do what, and what the first of them said."""
    if failed := [result for result in results if result.status]:
        numbers = [str(result.worker) for result in failed if result.worker is not None]
        who = f"worker{'s' * (len(numbers) > 1)} {', '.join(numbers)} " if numbers else ""
        raise PodError(f"{who}could not {what} (exit status {failed[0].status}): {failed[0].message}")


class Transport(Protocol):
    """A pod and the way to it. Every method raises PodError, in one line, for a pod that cannot be reached at all."""

    @property
    def num_workers(self) -> int:
        """Hosts of the pod."""

    def describe(self) -> dict | None:
        """Return {"state", "health", "acceleratorType", "workers", ...}, or None where there is no such pod."""

    def found(self) -> dict:
        """Return the same; PodError where there is no such pod."""

    def create(self) -> str:
        """Make the pod, and return a line that says so, or that it was there."""

    def wait(self) -> str:
        """Return, with a line that says so, when the pod can be used."""

    def delete(self) -> str:
        """Give the pod back, and return a line that says so, or that there was none."""

    def put_code(self) -> None:
        """Bring the present commit and its packages to every worker, again where they are there already."""

    def run(self, command: str, *, worker: str = "all", show: bool = True, output_directory: str = "") -> list[Result]:
        """Run a shell command, from the host's home folder, on the workers named: "all", "0", "0-3" or "0,2".

        With `show` its output is displayed as it comes. With `output_directory` each worker's output is left in
        a file WORKER.log there.
        """

    def run_each(self, command: str) -> list[Result]:
        """Run it by one call a worker, side by side, showing nothing, so that an unreachable one hides no other."""

    def copy(self, source: str, target: str, *, worker: str = "all", recurse: bool = True) -> None:
        """Copy between here and the workers, whose paths are written NAME:PATH; PodError where that fails."""


def connect(settings) -> Transport:
    """Return the transport that `settings` name; nothing is called yet."""
    if settings.transport == "local":
        from pods.local import Local

        return Local(settings)
    from pods.gcloud import Gcloud

    return Gcloud(settings)


def selected(worker: str, num_workers: int) -> list[int]:
    """Return the numbers that "all", "0", "0-3" or "0,2" stand for; PodError where the pod has no such worker."""
    check_worker(worker)
    if worker == "all":
        return list(range(num_workers))
    ends = [part.partition("-") for part in worker.split(",")]
    ranges = [range(int(first), int(last or first) + 1) for first, _, last in ends]
    if not any(ranges) or max(numbers.stop for numbers in ranges) > num_workers:
        raise usage_error(f"--worker={shown(worker)}: the pod has workers 0 to {num_workers - 1}")
    return sorted(set().union(*ranges))


def check_worker(worker: str) -> None:
    """Raise PodError unless `worker` is what gcloud takes."""
    if not WORKERS.fullmatch(worker):
        raise usage_error(f"--worker={shown(worker)} is not all, a number, a range 0-3 or a list 0,2")
