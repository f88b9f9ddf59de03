# SPDX-License-Identifier: Apache-2.0
"""Starts workers, waits for them, and says how a study stands when they have ended."""

import collections
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable

from configs.errors import OfAllProcesses
from reporting import display
from reporting.display import counted
from settings.loading import ROOT
from studies import trials
from studies.cost import budget, retention
from studies.cost.limits import Limits
from studies.worker import USAGE, Task

Devices = list[dict[str, str]]  # of each worker, the variables that choose its devices


class Unfinished(OfAllProcesses):
    """Trials are left; the same command continues them."""

    exit_status = 75


class OutOfBudget(RuntimeError):
    """Trials are left, and the budget does not suffice for the next one."""

    exit_status = 1


class Failed(RuntimeError):
    """Every trial has ended, and some have failed or were cancelled."""

    exit_status = 1


def in_processes(task: Task, devices: Devices) -> list[int]:
    """Run workers until they end; return their exit statuses."""
    return work("studies.worker", dataclasses.asdict(task), devices)


def run(
    queue: trials.Queue, task: Task, devices: Devices, start: Callable[[Task, Devices], list[int]] = in_processes
) -> None:  # fmt: skip
    """Work on the trials of a task until all have ended; `start` runs workers, and returns their exit statuses.

    Raises:
      Unfinished: the command was interrupted, or its workers died.
      OutOfBudget: the budget does not suffice for the next trial.
      Failed: trials have failed or were cancelled.
    """
    digests = set(task.digests)
    how = queue, digests, task.limits, task.root
    for line in (*retention.elsewhere(*how), *retention.enforce(*how)):  # what an earlier run could not delete, or kept
        print(line, flush=True)
    left = sum(not trial.state.is_finished() for digest, trial in queue.latest().items() if digest in digests)
    _judge(queue, digests, start(task, devices[:left]), task.limits)


def work(module: str, content: dict, devices: Devices) -> list[int]:
    """Run processes of a module of workers with this JSON until they end; return their exit statuses.

    An interruption of this process asks them to end. A worker that then exits with 0 is reported as ended by SIGTERM,
    so that the study counts as interrupted.
    """
    text = json.dumps(content | {"parent": os.getpid()})
    processes = [_start(module, text, of_worker) for of_worker in devices]
    try:
        for process in processes:
            process.wait()
        return [process.returncode for process in processes]
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one would end the trials before they have saved
            signal.signal(number, signal.SIG_IGN)
        for process in processes:
            process.terminate()
        print("asked to stop: running trials save", file=sys.stderr, flush=True)
        for process in processes:
            process.wait()
        return [process.returncode or -signal.SIGTERM for process in processes]


def _start(module: str, content: str, devices: dict[str, str]) -> subprocess.Popen:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])])
    environment = os.environ | devices | {"PYTHONPATH": path}
    command = [sys.executable, "-m", module]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True, text=True)
    process.stdin.write(content)
    process.stdin.close()
    return process


def _judge(queue: trials.Queue, digests: set[str], statuses: list[int], limits: Limits) -> None:
    found = [trial for digest, trial in queue.latest().items() if digest in digests]
    count = collections.Counter(map(trials.standing, found))
    also = f", {count['cancelled']} cancelled" if count["cancelled"] else ""
    print(f"{queue.name}: {count['done']} done, {count['failed']} failed{also}, {count['left']} left", flush=True)
    if count["left"]:
        still_left = display.left(count["left"], "trial")
        ended = (0, -signal.SIGTERM)  # SIGTERM ends a worker that has only begun
        died = [status for status in statuses if status not in ended]
        if not died and (reason := budget.reason_to_end(queue, digests, limits)):
            raise OutOfBudget(f"{still_left}: {reason}")
        if USAGE in died:  # the same command would meet the same mistake
            raise Failed(f"a worker ended by the error above; {still_left}")
        why = f"{counted(len(died), 'worker')} died (status {died[0]})" if died else "interrupted"
        raise Unfinished(f"{why}; {still_left}, run the same command to continue")
    if count["failed"]:
        first = next(trial for trial in found if trials.standing(trial) == "failed")
        raise Failed(
            f"{counted(count['failed'], 'trial')} failed, first {trials.title(first)}: {first.user_attrs['reason']}; "
            f"`sweep.py retry` queues them again"
        )
    if count["cancelled"]:
        raise Failed(f"{counted(count['cancelled'], 'trial')} cancelled; `sweep.py retry` queues them again")
