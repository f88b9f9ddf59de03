# SPDX-License-Identifier: Apache-2.0
"""Checks whether a pod is ready to train, and writes a table with the evidence to READINESS.md.

The evidence has three sources: the pod's state, a shell command on each host, and scripts/check_host.py. That script
trains three steps of the real configuration on all hosts together and restores the checkpoint. While a run holds the
devices, it prepares the data and compiles the step ahead of time instead, and the rest waits for a free pod.
"""

import contextlib
import dataclasses
import math
import pathlib
import re
import secrets
import shlex
import time

from configs import topologies
from files.json_reader import JsonError, parse_json
from pods import deploy, hosts, recipes, records, watch
from pods.answers import Ahead, Checked
from pods.checks import ahead
from pods.checks.evidence import UNREACHED, Found, Item
from pods.errors import PodError
from pods.gcloud import storage
from pods.settings import Settings, is_per_host
from pods.transports import Result, Transport
from reporting.display import aligned, counted

REPORT = "READINESS.md"
MARK = "CHECKED "  # begins the line of scripts/check_host.py
PAGE = {True: "yes", False: "**no**", None: "waits"}  # a verdict in READINESS.md
LONGEST = 200  # characters of an item in the last line
STEPS = [1, 2, 3, 4]  # three steps, then one after the restore
PLACES = {  # {multi-region or predefined dual-region of a bucket: prefixes of its regions}, cloud.google.com/storage
    "us": ("us",), "eu": ("europe",), "asia": ("asia",), "nam4": ("us-central1", "us-east1"),
    "eur4": ("europe-north1", "europe-west4"), "eur5": ("europe-west1", "europe-west2"),
    "eur7": ("europe-west2", "europe-west3"), "eur8": ("europe-west3", "europe-west6"),
    "asia1": ("asia-northeast1", "asia-northeast2"),
}  # fmt: skip


def validate(settings: Settings, transport: Transport, rest: list[str]) -> None:
    """Check everything, print the table, write READINESS.md in the pod's folder; PodError if an item is not ready.

    While a run holds the devices, items that need them are not checked; that is not a failure.
    """
    settings = recipes.of_pod(settings, transport)
    switches = recipes.resolved_switches(settings)
    recipes.print_left_out(settings, switches)
    pod = {} if settings.dry_run else transport.found()
    workdir = settings.run_folder()
    scratch = f"{workdir.rstrip('/')}-readiness-{secrets.token_hex(3)}"  # only for this call
    keys = _data_keys(settings) | switches.keys | recipes.storage_keys(workdir, transport.num_workers)
    words = recipes.arguments(settings, keys, (), scratch)
    if settings.dry_run:
        transport.run_each(_command(settings, words))
        return
    workers = watch.look(settings, transport, None)
    busy = [worker.number for worker in workers if worker.alive]
    outputs = _ahead(settings, transport, words) if busy else _three_steps(settings, transport, words, scratch)
    checks = [_printed(output, Ahead if busy else Checked) for output in outputs]
    data = recipes.buckets_of_data(words)
    _report(Found(settings, pod, workers, switches, workdir, outputs, checks, data, busy))


def _data_keys(settings: Settings) -> dict[str, object]:
    """Return the keys of the data that `launch_optimized` reads; without a data set, a local pod needs no network."""
    if settings.transport == "local":
        return recipes.chosen_data_keys(settings)
    return recipes.pretraining_keys(settings)


def _report(found: Found) -> None:
    """Judge all items, print the table and write the page; PodError if an item is not ready."""
    settings = found.settings
    items = [judge(name, found) for name in (BUSY if found.busy else ITEMS)]
    page = settings.pod_folder / REPORT
    page.parent.mkdir(parents=True, exist_ok=True)
    points = found.first.get("points", [])
    page.write_text(markdown(settings, items, points))
    rows = [[item.name, item.verdict, item.evidence] for item in items]
    rows += [[point["name"], point["verdict"], point["evidence"]] for point in points]
    print("\n".join([*aligned(rows), f"written to {page}"]))
    if any(item.ready is False for item in items):
        raise PodError(f"{settings.name} is not ready: {_why(items)}")
    if waiting := [item.name for item in items if item.ready is None]:
        print(f"nothing failed; {deploy.WAITS}, {deploy.held_by(found.busy)}: {', '.join(waiting)}")


def judge(name: str, found: Found) -> Item:
    """Return one item of the table."""
    if name in OF_THE_RUN and not found.first:
        return Item(name, False, UNREACHED)
    wrong, evidence = (BUSY if found.busy else ITEMS)[name](found)
    if wrong or not found.busy or name not in NEED_DEVICES:
        return Item(name, not wrong, "; ".join(wrong) or evidence)
    return Item(name, None, "; ".join(filter(None, (deploy.WAITS, evidence))))


def hardware(found: Found) -> tuple[list[str], str]:
    """Check that the pod exists and is healthy, and that its hosts see as many chips as its type has."""
    pod, topology = found.pod, recipes.preset(found.settings)
    state = ", ".join(filter(None, (pod.get("state"), pod.get("health"), pod.get("acceleratorType"))))
    counts = [check["local_devices"] for check in found.answers.values()]
    wrong = watch.problems(found.settings, pod, []) or ([] if counts else [UNREACHED])
    if counts and topology and sum(counts) != topology.chips:
        wrong.append(f"{sum(counts)} devices where {found.settings.accel} has {topology.chips} chips")
    kind = "simulated CPU devices" if found.first.get("simulated") else found.first.get("device_kind", "devices")
    return wrong, f"{state}; {' + '.join(map(str, counts))} {kind}"


def processes(found: Found) -> tuple[list[str], str]:
    """Check that every host's process sees all other processes."""
    count, total = len(found.checks), sum(check["local_devices"] for check in found.answers.values())
    wrong = [f"worker {n}: {found.outputs[n].message}" for n in range(count) if n not in found.answers]
    wrong += [
        f"worker {n} sees {check['num_processes']} processes, {check['num_devices']} devices"
        for n, check in found.answers.items()
        if (check["num_processes"], check["num_devices"]) != (count, total)
    ]
    return wrong, f"{count} {'process' if count == 1 else 'processes'}, each sees {counted(total, 'device')}"


def versions(found: Found) -> tuple[list[str], str]:
    """Check that all hosts have the same library versions, as in the lock file."""
    wrong = found.differences("versions")
    wrong += [f"worker {n}: {line}" for n, check in found.answers.items() for line in check["not_as_locked"]]
    return wrong, ", ".join(f"{name} {version}" for name, version in found.first["versions"].items())


def code(found: Found) -> tuple[list[str], str]:
    """Check that all hosts have the commit of this clone, and that no file is changed there or here."""
    commit, changed = records.code_state()
    wrong = [] if commit else ["the code here is not a git clone with a commit"]
    wrong += [f"{len(changed)} uncommitted changes here, such as {changed[0]}"] if changed else []
    for worker in found.workers:
        if not worker.reachable:
            wrong.append(worker.trouble())
        elif worker.commit != commit:
            wrong.append(f"worker {worker.number} has commit {worker.commit[:12] or 'none'}, this clone {commit[:12]}")
        elif worker.changed:
            wrong.append(f"worker {worker.number} has {worker.changed} changed files")
    return wrong, f"commit {commit[:12]} on {counted(len(found.workers), 'host')} and here, no changes"


def mesh(found: Found) -> tuple[list[str], str]:
    """Check that all hosts built the same mesh."""
    axes = " * ".join(f"{axis}={size}" for axis, size in found.first["mesh"].items())
    return found.differences("mesh"), axes or "one device"


def corpus(found: Found) -> tuple[list[str], str]:
    """Check that every host has prepared the same corpus."""
    first = found.first
    return found.differences("corpus"), f"{first['corpus_tokens']:,} tokens to train on, digest {first['corpus'][:12]}"


def three_steps(found: Found) -> tuple[list[str], str]:
    """Check that three steps of the real configuration, with every enabled feature, have a finite loss."""
    losses = [line["loss"] for line in found.first["trained"]]
    if len(losses) < 3 or None in losses:
        return [f"losses {losses}"], ""
    on = ", ".join(found.switches.on) or "no switch"
    return [], f"losses {', '.join(f'{loss:.4f}' for loss in losses[:3])}; on: {on}"


def checkpoint(found: Found) -> tuple[list[str], str]:
    """Check that the checkpoint was restored with valid digests and that training resumed from it."""
    steps, starts = [line["step"] for line in found.first["trained"]], found.first["starts"]
    wrong = [f"steps {steps}, starts {starts}"] if (steps, starts) != (STEPS, [0, 3]) else []
    return wrong, f"saved at step 3 next to {found.workdir}, restored, continued to step 4"


def storage_place(found: Found) -> tuple[list[str], str]:
    """Check that the run's bucket is writable, or its shared folder, and that all buckets are in the pod's region."""
    own = "gs://" + found.workdir.removeprefix("gs://").partition("/")[0] if found.workdir.startswith("gs://") else ""
    wrong, evidence = _writable(found, own) if own else _shared(found)
    for bucket in (bucket for bucket in found.data if bucket != own):
        location, far = _location(found.settings, bucket)
        wrong, evidence = wrong + far, f"{evidence}; data in {bucket}, in {location}"
    return wrong, evidence


def _shared(found: Found) -> tuple[list[str], str]:
    """Return what is wrong with a folder that is not in a bucket, and the evidence."""
    if found.busy:
        return [], f"{found.workdir} is written by the run that holds the devices"
    if is_per_host(found.workdir, len(found.checks)):
        evidence = f"each host keeps its part in {found.workdir}; lost with the pod unless BUCKET is set"
        return [] if found.first else [UNREACHED], evidence
    return [] if found.first else [UNREACHED], f"{found.workdir} written and read by every host"


def _writable(found: Found, bucket: str) -> tuple[list[str], str]:
    """Return what is wrong with the bucket of the run, and the evidence."""
    location, wrong = _location(found.settings, bucket)
    if not location:
        return wrong, ""
    probe = f"{bucket}/readiness-{secrets.token_hex(4)}"
    for words in (["cp", str(pathlib.Path(__file__)), probe], ["rm", probe]):
        done = storage(found.settings, words)
        wrong += [f"{bucket}: {done.message}"] if done.status else []
    return wrong, f"{bucket} in {location}, with the pod; written and removed {probe}"


def _location(settings: Settings, bucket: str) -> tuple[str, list[str]]:
    """Return the location of a bucket, "" if it is unknown, and what is wrong with it."""
    answer = storage(settings, ["buckets", "describe", bucket, "--format=value(location)"])
    if answer.status:
        return "", [f"{bucket}: {answer.message}"]
    location, region = answer.output.strip().splitlines()[-1].lower(), settings.zone.rpartition("-")[0]
    near = any(f"{region}-".startswith(f"{place}-") for place in PLACES.get(location, (location,)))
    return location, [] if near else [f"{bucket} is in {location}, the pod in {region}"]


def logging(found: Found) -> tuple[list[str], str]:
    """Check that metrics.jsonl has a complete line for each step, and that every process writes a log."""
    lines = found.first["trained"]
    wrong = [] if all(line["tokens_per_second"] for line in lines) else ["metrics.jsonl has lines without a speed"]
    wrong += [f"worker {n} writes no log" for n, check in found.answers.items() if not check["log"]]
    return wrong, f"{len(lines)} lines of metrics.jsonl, a log of each process"


def monitoring(found: Found) -> tuple[list[str], str]:
    """Check that every worker can be reached and wrote heartbeats while it trained."""
    wrong = [f"worker {n} wrote no heartbeat" for n, check in found.answers.items() if not check["heartbeat"]]
    wrong += [worker.trouble() for worker in found.workers if not worker.reachable]
    return wrong, "heartbeats of all workers; `supervise` restarts what dies"


def cost(found: Found) -> tuple[list[str], str]:
    """Return the cost of a run from the time of a step; no figure if it was simulated or the price is unknown."""
    settings, topology = found.settings, recipes.preset(found.settings)
    price = watch.price_per_chip_hour(dataclasses.replace(settings, transport="gcloud"))  # of the simulated pod
    if topology is None or price is None:
        return [], f"the price of {settings.accel} is not known; set --price=DOLLARS per chip-hour"
    chips = topology.chips
    source = "as given" if settings.given("price") else topologies.PRICES_AS_OF
    hour = f"${chips * price:,.2f} an hour for {chips} chips at ${price:.2f} ({source})"
    if not found.busy and found.first.get("simulated"):
        return [], f"{hour}; the number of hours is unknown, because the steps were simulated"
    if not (found.rehearsed.get("step_seconds") if found.busy else found.first.get("trained", [])[2:]):
        return [], f"{hour}; the number of hours is unknown, because no step was measured"
    seconds = found.rehearsed["step_seconds"] if found.busy else found.first["trained"][2]["step_seconds"] or math.nan
    how = ", rehearsed" if found.busy else ""
    return [], f"{hour}; ${1000 * seconds / 3600 * chips * price:,.2f} for 1,000 steps of {seconds:.3f} s{how}"


OF_THE_RUN = {  # items that need the run on the hosts
    "versions": versions, "mesh": mesh, "data": corpus, "3-step run": three_steps, "checkpoint": checkpoint,
    "metrics and logs": logging, "monitoring and recovery": monitoring,
}  # fmt: skip
ITEMS = {
    "hardware": hardware,
    "processes": processes,
    "code": code,
    **OF_THE_RUN,
    "storage": storage_place,
    "cost": cost,
}
LATER = ("3-step run", "checkpoint", "metrics and logs", "monitoring and recovery")
BUSY = ITEMS | dict.fromkeys(LATER, ahead.later) | {  # the items while a run holds the devices
    "hardware": ahead.pod_state, "processes": ahead.answers, "mesh": ahead.rehearsed_mesh,
    "compilation": ahead.compilation,
}  # fmt: skip
NEED_DEVICES = ("hardware", "processes", "mesh", *LATER)  # a part of them at least


def markdown(settings: Settings, items: list[Item], points: list[dict]) -> str:
    """Return a Markdown page: the table, and a table of points for a long run, which do not affect readiness."""
    ready = "ready" if all(item.ready for item in items) else "NOT ready"
    if ready == "NOT ready" and all(item.ready is not False for item in items):
        ready = f"checked in part; the rest {deploy.WAITS}"
    run = f"{settings.accel}, {settings.transport}, {settings.recipe}; {time.strftime('%F %T %Z')}"
    lines = [f"# {settings.name} is {ready}", "", run, "", "| item | ready | evidence |", "|---|---|---|"]
    for name, is_ready, evidence in items:
        lines.append(f"| {name} | {PAGE[is_ready]} | {evidence.replace('|', '/')} |")
    if points:
        lines += ["", "What a long run should have, judged by the step that ran:", "", "| point | verdict | evidence |"]
        lines += ["|---|---|---|"]
    for point in points:
        lines.append(f"| {point['name']} | {point['verdict']} | {point['evidence'].replace('|', '/')} |")
    return "\n".join([*lines, ""])


def _command(settings: Settings, words: list[str], prefix: tuple[str, ...] = (), more: str = "") -> str:
    """Return the command of scripts/check_host.py with train.py's arguments, and `more` for the shell."""
    program = shlex.join([*prefix, hosts.python(settings), "scripts/check_host.py", *words]) + more
    return hosts.in_environment(settings, program if "--ahead" in words else hosts.attached(program))


def _three_steps(settings: Settings, transport: Transport, words: list[str], scratch: str) -> list[Result]:
    """Train on all hosts, then remove the scratch folder."""
    print(f"training three steps on {counted(transport.num_workers, 'host')}", flush=True)
    try:
        return transport.run_each(_command(settings, words), together=True)
    except KeyboardInterrupt:
        print("stopping the three steps", flush=True)  # the end of ssh does not; they write the folder
        transport.run(hosts.stop(settings, for_good=False), show=False)
        raise
    finally:
        transport.run(hosts.in_code(settings, f"rm -rf {hosts.here(scratch)}"), show=False)
        if "://" in scratch:
            storage(settings, ["rm", "-r", scratch])


def _ahead(settings: Settings, transport: Transport, words: list[str]) -> list[Result]:
    """Check what needs no device: each host by itself; the coordinator also compiles the step."""
    print("a run holds the devices: checking what needs none", flush=True)
    compiles = f' $([ "$W" = {settings.coordinator_worker} ] && echo --rehearse)'
    return transport.run_each(_command(settings, [*words, "--ahead"], hosts.IN_BACKGROUND, compiles))


def _printed(output: Result, schema: type) -> Checked | Ahead | None:
    """Return the answer that a host's script printed; None if there is none, or an invalid one."""
    line = re.search(f"^{MARK}(.*)$", output.output, re.MULTILINE)
    if not line or output.status:
        return None
    with contextlib.suppress(JsonError):
        return parse_json(line[1], schema, MARK)


def _why(items: list[Item]) -> str:
    """Return the failed items in one line; the items that were not reached because of them come last."""
    failed = [item for item in items if item.ready is False]
    reached = [f"{item.name}: {item.evidence[:LONGEST]}" for item in failed if item.evidence != UNREACHED]
    unreached = [item.name for item in failed if item.evidence == UNREACHED]
    return "; ".join(reached + ([f"not reached because of this: {', '.join(unreached)}"] if unreached else []))
