# SPDX-License-Identifier: Apache-2.0
"""A study on several hosts: process 0 claims each trial (studies/leading.py), and every host runs a process of it.

The processes of sweep.py have a hub of their own. They never initialize jax.distributed: the processes of the trial do,
by the same environment. Only process 0 uses the database, so that the other hosts need neither its address nor Optuna.
"""

import dataclasses
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

from cluster import processes
from cluster.group import Group
from cluster.hub import RunError
from studies import program

TRIAL, STATUS = "trial", "status"  # topics
LOOK_SECONDS = 0.2  # between two looks at the process of a trial
UNFINISHED = 75
WITHOUT_ERROR = (0, UNFINISHED)  # exit statuses
READ = ("recipe", "workdir", "topology", "changes")  # user attributes of a trial that its command needs


@dataclasses.dataclass(frozen=True)
class End:
    """How a study ended: an exit status, and the last line that the user reads."""

    status: int
    line: str

    def tell(self) -> int:
        """Leave the other hosts, and print the line; return the status."""
        processes.leave()
        if self.line:
            print(self.line if self.status in WITHOUT_ERROR else f"error: {self.line}", file=sys.stderr, flush=True)
        return self.status


def join(group: Group, join_seconds: float, on_end: Callable[[str, int], None], root: str) -> None:
    """Join the other hosts; from now on SIGINT and SIGTERM on any host stop the study on all.

    Args:
      on_end: ends this process, see `processes.start`. If another host has died or did not come within `join_seconds`,
        the status is that of a study with trials left, so that `pod.py supervise` starts it again.
      root: folder of the trials' folders.
    """

    def end(line: str, status: int) -> None:
        lost = status == RunError.exit_status
        on_end(f"{line}; run the same command to continue" if lost else line, UNFINISHED if lost else status)

    try:
        processes.join(group, group.study_port, join_seconds, end, None if "://" in root else pathlib.Path(root))
    except RunError as error:
        end(str(error), error.exit_status)
    else:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: processes.ask_to_stop())


def follow(command: Sequence[str] = program.TRAIN) -> End:
    """Run this host's process of each trial that process 0 claims; return how the study ended.

    `command` starts a trial; its flags are added.
    """
    while True:
        order = processes.shared(TRIAL, lambda: None)
        if end := order.get("end"):
            return End(**end)
        processes.gather(STATUS, _run(program.command_of(order, command)))


def _run(command: list[str]) -> int:
    """Return the exit status of a process, which is asked to save and end if the study stops."""
    process, terminated = program.start(command), False
    try:
        while True:
            if processes.stop_agreed() and not terminated:
                process.terminate()  # once: a second signal would end it without saving
                terminated = True
            try:
                return process.wait(LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                continue
    finally:
        process.kill()
