# SPDX-License-Identifier: Apache-2.0
"""Process 0 of a study or search on several hosts: it claims each trial, shares it, and judges how it ended."""

import dataclasses
import signal
from collections.abc import Callable

from optuna.trial import FrozenTrial

from cluster import processes
from cluster.hub import RunError
from configs.errors import ConfigError
from studies import launch, pod
from studies.launch import Failed, OutOfBudget, Unfinished
from studies.search.searching import Search
from studies.search.training import searcher_of
from studies.storage import OutOfReach, reaching
from studies.worker import DONE, INTERRUPTED, Task, Worker


class OnAllHosts(Worker):
    """What makes a worker the leader: its trials run on all hosts, and any host can stop it."""

    @property
    def asked_to_stop(self) -> bool:
        """Whether any host was asked to stop."""
        return processes.stop_agreed()

    def stop(self, *_) -> None:
        """Ask all hosts for an end."""
        processes.ask_to_stop()

    def attempt(self, trial: FrozenTrial, output) -> tuple[int, str]:
        """Run a process of the trial on every host; return a status that is not 0 if any host has one."""
        processes.shared(pod.TRIAL, lambda: {name: trial.user_attrs[name] for name in pod.READ})
        status, ended_for = -signal.SIGKILL, ""
        try:
            status, ended_for = super().attempt(trial, output)
        finally:  # also if the claim is lost: the process here was killed, and the others have to end too
            statuses = processes.gather(pod.STATUS, status)
        if self.asked_to_stop and any(statuses):  # a process that only began is killed by SIGTERM, and ends the others
            return INTERRUPTED, ended_for
        return status or next(filter(None, statuses), DONE), ended_for


def on_all_hosts(task: Task, devices: launch.Devices) -> list[int]:
    """Run all trials of a task on all hosts, one at a time; for `launch.run`."""
    OnAllHosts(task).run()
    return []


def search_on_all_hosts(search: Search, devices: launch.Devices) -> list[int]:
    """Run all trials of a search on all hosts, one at a time; for `studies.search.training.train`."""
    leader = type("Leader", (OnAllHosts, searcher_of(search)), {})(search)
    leader.run()
    return [-signal.SIGTERM] if leader.asked_to_stop else []


def lead(run: Callable[[], None]) -> pod.End:
    """Run a study, and tell the others how it ended; `run` raises the exceptions of `launch.run`."""
    try:
        with reaching():
            run()
        end = pod.End(DONE, "")
    except (Failed, OutOfBudget, OutOfReach, Unfinished, ConfigError) as error:
        end = pod.End(error.exit_status, str(error))
    except RunError as error:  # a bucket that did not answer for long; the same command continues
        end = pod.End(pod.UNFINISHED, str(error))
    processes.shared(pod.TRIAL, lambda: {"end": dataclasses.asdict(end)})
    return end
