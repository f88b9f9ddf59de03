# SPDX-License-Identifier: Apache-2.0
"""`sweep.py run`: on one host with several workers, or on all hosts of a pod, led by process 0."""

import importlib
import os
import signal
from collections.abc import Callable

from cluster import processes, startup
from cluster.group import Group, find_group
from configs import topologies
from configs.errors import ConfigError
from core import ending
from files.folders import make_writable
from reporting.display import counted
from studies import pod, program
from studies.asked import StudyRequest, estimates, limits_of
from studies.cost import planning


def run(asked: StudyRequest) -> int:
    """Queue and run; print each trial's end. On several hosts process 0 does this, and the others follow it."""
    parsed = asked.parsed
    if parsed.dry_run:
        print("\n".join(planning.table(asked.study, asked.members, asked.topology, estimates(asked)[0])))
        print("dry run: nothing was queued or started")
        return 0

    def work(on_hosts: bool, devices: list[dict[str, str]]) -> None:
        if on_hosts:
            from studies.leading import on_all_hosts as start
        else:
            from studies.launch import in_processes as start
        queue_and_work(asked, devices, start)

    return on_hosts_or_here(parsed, asked.root, work)


def on_hosts_or_here(parsed, root: str, work: Callable[[bool, list[dict[str, str]]], None]) -> int:
    """Work here, or lead or follow the other hosts of this pod; return the exit status.

    Only process 0 calls `work`, which runs all trials, on all hosts if its first argument is true. Its second argument
    has, for each worker, the variables that choose its devices.
    """
    group = group_of_hosts(parsed.join_seconds)
    if not parsed.allow_local:
        check_root(root, parsed.topology, group)
    if group and parsed.workers > 1:
        raise ConfigError(
            f"--workers={parsed.workers}: the {group.count} hosts train one trial at a time; omit the flag"
        )
    if not group:
        topology = topologies.get(parsed.topology) if parsed.topology else None
        devices = startup.shares_of_devices(parsed.workers, topology)
        storage = importlib.import_module("studies.storage")  # says so if a package is missing
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with storage.reaching():
            work(False, devices)
        return 0
    pod.join(group, parsed.join_seconds, ending.with_the_others, root)
    if processes.index():
        return pod.follow().tell()
    importlib.import_module("studies.storage")  # as above
    from studies import leading

    return leading.lead(lambda: work(True, [{}])).tell()


def group_of_hosts(join_seconds: float) -> Group | None:
    """Return the group that this process belongs to by its environment; None if it is alone."""
    group = find_group(os.environ, startup.attached_accelerator(), join_seconds)
    return group if group and group.count > 1 else None


def queue_and_work(asked: StudyRequest, devices: list[dict[str, str]], start: Callable) -> None:
    """Queue what has no trial yet, and work until all trials have ended; `start` is that of launch.run."""
    from studies import launch, trials
    from studies.cost import guards
    from studies.worker import Task

    parsed = asked.parsed
    if not parsed.skip_small:
        guards.check_small_run(asked.runnable, asked.topology, asked.root, parsed.storage)
    make_root(asked.root)
    refused = [f"{member.title} is left out: {member.refusal}" for member in asked.members if member.refusal]
    queue = asked.queue(create=True)
    if refused:
        print("\n".join(refused), flush=True)
    orders = asked.orders()
    for line in trials.queued_elsewhere(orders, queue.latest()):
        print(line, flush=True)
    added, all_of_them = queue.enqueue(orders), len(asked.digests)
    shared = len(asked.runnable) - all_of_them
    note = f" ({counted(shared, 'configuration')} with the trial of an equal one)" if shared else ""
    print(f"{asked.study.name}: {counted(all_of_them, 'trial')}{note}, {added} of them new; {asked.root}", flush=True)
    task = Task(
        parsed.storage, queue.name, sorted(asked.digests), asked.study.suite.metric, list(program.TRAIN),
        limits_of(asked), asked.root,
    )  # fmt: skip
    launch.run(queue, task, devices, start)


def check_root(root: str, topology: str, group: Group | None) -> None:
    """Raise ConfigError if trials run on several hosts and write to a local folder: each host has its own."""
    is_pod = group is not None or (topology and topologies.get(topology).hosts > 1)
    if is_pod and "://" not in root:
        where = f"the hosts of {topology}" if topology else "the hosts of this group"
        raise ConfigError(
            f"--root={root} is a local folder, which {where} do not share and which is lost with the pod; "
            "use --root=gs://BUCKET/FOLDER, or --allow_local for a mounted folder or a simulation"
        )


def make_root(root: str) -> None:
    """Make the folder of the trials' folders unless it is in a bucket; ConfigError if it cannot be made or written."""
    if "://" in root:
        return
    try:
        make_writable(root)
    except OSError as error:
        raise ConfigError(f"--root={root}: {error.strerror}; name a folder that can be written") from None
