# SPDX-License-Identifier: Apache-2.0
"""The subcommands that create, prepare, reach and delete a pod.

Each function takes the settings, the transport and the remaining arguments. It raises PodError. For a recipe that
cannot run, `setup` raises ConfigError.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator

from files.folders import make_writable
from files.paths import expanded
from pods import capacity, deploy, hosts, recipes, records
from pods.calls import note
from pods.connection import connect
from pods.errors import PodError, usage_error
from pods.settings import Settings, worker_numbers
from pods.transports import Transport, expect_success
from reporting.display import counted

# Variables of this machine that are copied to the hosts.
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "TORUS_ALERTS_URL", "TORUS_RUN_SECRET")
REMOTE = re.compile(r"([a-z][-a-z0-9]*):(?:/(?=/))?(.*)", re.DOTALL)  # NAME:/path, NAME:~/path and NAME://path


def versions(settings: Settings, transport: Transport, rest: list[str]) -> None:
    """Display the software versions and the accelerators of the zone."""
    transport.versions()


def create(settings: Settings, transport: Transport, rest: list[str]) -> None:
    """Create the pod; if it exists, describe it. With --zones or --wait, try until a zone has one."""
    if settings.transport != "local":
        # It holds the flags of the creation; check that it can be written before a pod exists.
        local_folder(settings, str(settings.pod_folder))
    if settings.zones or settings.wait:
        capacity.search(settings)
        return
    if not settings.version:
        transport.versions()
    line = transport.create()
    note(settings, line)
    exists = line.endswith("exists already")
    if not settings.dry_run and not (exists and records.creation_kept(settings)):
        records.keep_creation(settings)
    if exists and not settings.queued:
        pod = transport.describe() or {}
        print(_summary(settings, pod))
        actual = pod.get("acceleratorType", settings.accel)
        if recipes.ours(actual) != recipes.ours(settings.accel) and not settings.type:
            print(f"warning: the existing pod is a {actual}, but ACCEL={settings.accel}")
        if settings.workers and settings.workers != pod.get("workers", settings.workers):
            print(f"warning: the existing pod has {pod['workers']} workers, but --workers={settings.workers}")


def wait(settings: Settings, transport: Transport, rest: list[str]) -> None:
    """Wait until the pod can be used."""
    note(settings, transport.wait())


def describe(settings: Settings, transport: Transport, rest: list[str]) -> None:
    """Print state, health, accelerator and addresses; PodError with gcloud's message if there is no pod."""
    pod = transport.found()
    if not settings.dry_run:
        print(json.dumps(pod, indent=1) if settings.json else _summary(settings, pod))


def delete(settings: Settings, transport: Transport, rest: list[str]) -> None:
    """Delete the pod, or the request for it that still waits, and the record of its launch."""
    try:
        created = records.as_created(settings)
        targets = [settings, created] if created.queued and not settings.queued else [settings]
        places = [records.created_elsewhere(target) for target in targets]
    except PodError as error:  # the pod is deleted nevertheless
        print(f"{error}; a request that still waits is deleted with --queued", file=sys.stderr)
        targets, places = [settings], [""]
    with contextlib.ExitStack() as without_records:  # for both: if a request cannot be deleted, the records stay
        for target, elsewhere in zip(targets, places, strict=True):
            if not elsewhere:
                without_records.enter_context(records.forgotten(settings))
            done = (transport if target is settings else connect(target)).delete()
            if done.existed:
                break
        note(settings, done.line)
    if elsewhere:
        note(settings, f"the pod that was created from here is in {elsewhere}; its records stay")


def setup(settings: Settings, transport: Transport, rest: list[str]) -> None:
    """Install code, packages, secrets and the optimizations' configuration on every host."""
    transport.put_code()
    share_secrets(settings, transport)
    expect_success(transport.run(hosts.count_devices(settings)), "count its devices")
    deploy.setup_optimizations(settings, transport, rest)


def share_secrets(settings: Settings, transport: Transport) -> None:
    """Copy the SECRETS that are set here to a file on every host, which a launch reads; no command line has them."""
    secrets = {name: os.environ[name] for name in SECRETS if os.environ.get(name)}
    if not secrets:
        return
    text = "".join(f"{name}={shlex.quote(value)}\n" for name, value in secrets.items())
    target = f"{settings.name}:{settings.repo_dir}/{hosts.ENV_FILE}"
    with tempfile.TemporaryDirectory() as folder:  # the folder has mode 700
        source = pathlib.Path("/tmp/private" if settings.dry_run else folder, hosts.ENV_FILE)
        if not settings.dry_run:
            source.touch(mode=0o600)
            source.write_text(text)
        transport.copy(str(source), target, recurse=False)
    expect_success(transport.run(hosts.protect_secrets(settings)), "protect its secrets")
    note(settings, f"{', '.join(secrets)}: in {settings.repo_dir}/{hosts.ENV_FILE} of every host")


def group_variables(settings: Settings, transport: Transport) -> dict[str, str]:
    """Return variables of the process group if PORT is set; otherwise the hosts detect the group."""
    if not settings.given("port") or settings.transport == "local":
        return {}
    pod = transport.found()
    endpoints = pod["networkEndpoints"]
    if not endpoints or len(endpoints) != pod["workers"]:  # while the slices are made
        raise PodError(f"only {counted(len(endpoints), 'host')} of {settings.name} so far; `wait` for it and try again")
    if not (address := endpoints[0].get("ipAddress")):  # of process 0, which opens the ports
        raise PodError(f"worker 0 of {settings.name} has no address yet; `wait` for it")
    return {
        "JAX_COORDINATOR_ADDRESS": f"{address}:{settings.port}",
        "JAX_PROCESS_COUNT": str(len(endpoints)),
        "JAX_PROCESS_INDEX": hosts.WORKER_NUMBER,
    }


def copy(settings: Settings, transport: Transport, rest: list[str]) -> None:
    """Copy SOURCE to TARGET between this machine and the pod; one of them is NAME:PATH.

    Files of several workers are copied to folders worker-I in the target.
    """
    if len(rest) != 2:
        got = counted(len(rest), "path")
        raise usage_error(f"copy takes a source and a target, one of them {settings.name}:PATH; got {got}")
    if any(path.startswith("gs:") for path in rest):
        raise usage_error("copy works between this machine and the pod; copy a bucket with `gcloud storage cp`")
    source, target = (REMOTE.fullmatch(path) for path in rest)
    if bool(source) == bool(target):
        raise usage_error(f"copy {shlex.join(rest)}: one of the two must be on the pod, as {settings.name}:PATH")
    pod = (source or target)[1]
    if pod != settings.name and settings.given("name"):
        raise usage_error(f"copy {shlex.join(rest)}: the pod is {settings.name}, not {pod}")
    transport, worker = connect(dataclasses.replace(settings, name=pod)), settings.worker or "all"
    remote = f"{pod}:{(source or target)[2]}"
    if target:
        path = expanded(rest[0])
        if not path.exists():
            raise usage_error(f"copy: there is no {rest[0]} here")
        transport.copy(str(path), remote, worker=worker, recurse=path.is_dir())
    elif worker.isdigit():
        transport.copy(remote, rest[1], worker=worker)
    else:  # scp copies from one worker at a time
        for number in worker_numbers(worker, transport.num_workers):
            with _own_folder(settings, f"{rest[1]}/worker-{number}") as folder:
                transport.copy(remote, f"{folder}/", worker=str(number))


@contextlib.contextmanager
def _own_folder(settings: Settings, path: str) -> Iterator[str]:
    """Give a folder to copy to; after a failure it is removed, if it was made for this copy and is empty."""
    is_new = not pathlib.Path(path).exists()
    try:
        yield local_folder(settings, path)
    except PodError:
        if is_new and pathlib.Path(path).is_dir() and not os.listdir(path):
            os.rmdir(path)
        raise


def ssh(settings: Settings, transport: Transport, rest: list[str]) -> None:
    """Run a command on the hosts; its exit status becomes that of pod.py."""
    if not rest:
        raise usage_error("ssh takes a command: pod.py ssh [--worker=0] -- COMMAND")
    worker = settings.worker or "all"
    command = rest[0] if len(rest) == 1 else shlex.join(rest)  # a single word is the text for the remote shell
    results = transport.run(command, worker=worker, output_directory=local_folder(settings, settings.output_directory))
    if status := next((result.status for result in results if result.status), 0):
        raise PodError(f"ssh to {settings.name}, worker {worker}: exit status {status}", exit_status=status)


def tail(settings: Settings, transport: Transport, rest: list[str]) -> None:
    """Follow the newest log of one worker; for several workers, print the end of each."""
    worker = settings.worker or str(settings.coordinator_worker)
    folder = local_folder(settings, settings.output_directory)
    command = hosts.tail(settings, follow=worker.isdigit() and not folder)
    expect_success(transport.run(command, worker=worker, output_directory=folder, together=False), "show its log")
    if folder:
        note(settings, f"the logs are in {folder}")


def _summary(settings: Settings, pod: dict) -> str:
    """Return a summary of a pod: one line, and one line for each host."""
    facts = [pod.get("state", "state unknown"), pod.get("health", "health unknown"), pod.get("acceleratorType", "")]
    addresses = [endpoint.get("ipAddress", "?") for endpoint in pod.get("networkEndpoints", [])]
    count = pod.get("workers", len(addresses))
    lines = [f"{settings.name}: {', '.join(filter(None, facts))}, {count} worker{'s' * (count != 1)}"]
    lines += [f"  worker {i}: {address}{' (coordinator)' * (i == 0)}" for i, address in enumerate(addresses)]
    return "\n".join(lines)


def local_folder(settings: Settings, path: str) -> str:
    """Return the path of a local folder; create it unless this is a dry run or the path is "".

    It is a usage error if the folder cannot be created, or nothing can be written into it.
    """
    if path and not settings.dry_run:
        try:
            make_writable(path)
        except OSError as error:
            raise usage_error(f"{path}: {error.strerror}; name a folder that can be written") from None
    return path
