# SPDX-License-Identifier: Apache-2.0
"""Checks whether a pod is ready to train, and writes a table with the evidence to READINESS.md.

The evidence has three sources: the pod's state, a shell command on each host, and scripts/check_host.py. That script
trains three steps of the real configuration on all hosts together and restores the checkpoint.
"""

import contextlib
import dataclasses
import math
import pathlib
import re
import secrets
import shlex
import time
from typing import NamedTuple

from configs import topologies
from files.json_reader import JsonError, parse_json
from pods import deploy, hosts, recipes, records, watch
from pods.answers import Checked
from pods.errors import PodError
from pods.gcloud import storage
from pods.settings import Settings, is_per_host
from pods.switches import Resolved
from pods.transports import Result, Transport
from reporting.display import aligned

REPORT = "READINESS.md"
MARK = "CHECKED "  # begins the line of scripts/check_host.py
UNREACHED = "the run on the hosts did not get this far"
LONGEST = 200  # characters of an item in the last line
STEPS = [1, 2, 3, 4]  # three steps, then one after the restore
CONTINENTS = {"us": "us", "eu": "europe", "asia": "asia"}  # {multi-region of a bucket: prefix of its regions}


class Item(NamedTuple):
    """One line of the table."""

    name: str
    ready: bool
    evidence: str


@dataclasses.dataclass
class Found:
    """The evidence for all checks. `checks` has the answer of each host's script, None if it printed none."""

    settings: Settings
    pod: dict
    workers: list[watch.Worker]
    switches: Resolved
    workdir: str
    outputs: list[Result]
    checks: list[Checked | None]

    @property
    def answers(self) -> dict[int, dict]:
        """The answers of the workers whose script gave one, by worker number."""
        return {number: check for number, check in enumerate(self.checks) if check}

    @property
    def first(self) -> dict:
        """The answer of process 0."""
        return next((check for check in self.answers.values() if check["process"] == 0), {})

    def differences(self, key: str) -> list[str]:
        """Return a line for each worker whose value differs from the first worker's."""
        one, *_ = self.answers
        values = {number: check[key] for number, check in self.answers.items() if check[key] != self.answers[one][key]}
        return [f"{key} of worker {n} differs from worker {one}: {value}" for n, value in values.items()]


def validate(settings: Settings, transport: Transport, rest: list[str]) -> int:
    """Check everything, print the table, write READINESS.md in the pod's folder; PodError if an item is not ready."""
    settings = recipes.of_pod(settings, transport)
    switches = recipes.resolved_switches(settings)
    keys = recipes.chosen_data_keys(settings) | switches.keys
    recipes.print_left_out(settings, switches)
    if not settings.dry_run:
        pod = transport.found()
        if settings.transport != "local":
            deploy.check_devices_free(settings, transport)
    workdir = settings.run_folder()
    scratch = f"{workdir.rstrip('/')}-readiness-{secrets.token_hex(3)}"  # only for this call
    keys |= recipes.storage_keys(workdir, transport.num_workers)
    words = [hosts.python(settings), "scripts/check_host.py", *recipes.arguments(settings, keys, (), scratch)]
    command = hosts.in_environment(settings, shlex.join(words))
    if settings.dry_run:
        transport.run_each(command)
        return 0
    workers = watch.look(settings, transport, None)
    outputs = _three_steps(settings, transport, command, scratch)
    found = Found(settings, pod, workers, switches, workdir, outputs, [_printed(output) for output in outputs])
    items = [judge(name, found) for name in ITEMS]
    page = settings.pod_folder / REPORT
    page.parent.mkdir(parents=True, exist_ok=True)
    points = found.first.get("points", [])
    page.write_text(markdown(settings, items, points))
    rows = [[item.name, "ready" if item.ready else "NOT READY", item.evidence] for item in items]
    rows += [[point["name"], point["verdict"], point["evidence"]] for point in points]
    print("\n".join([*aligned(rows), f"written to {page}"]))
    if not all(item.ready for item in items):
        raise PodError(f"{settings.name} is not ready: {_why(items)}")
    return 0


def judge(name: str, found: Found) -> Item:
    """Return one item of the table."""
    if name in OF_THE_RUN and not found.first:
        return Item(name, False, UNREACHED)
    wrong, evidence = ITEMS[name](found)
    return Item(name, not wrong, "; ".join(wrong) or evidence)


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
    return wrong, f"{count} processes, each sees {total} devices"


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
    return wrong, f"commit {commit[:12]} on {len(found.workers)} hosts and here, no changes"


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
    """Check that the bucket exists in the pod's region and is writable, or that the shared folder is writable."""
    if is_per_host(found.workdir, len(found.checks)):
        evidence = f"each host keeps its part in {found.workdir}; lost with the pod unless BUCKET is set"
        return [] if found.first else [UNREACHED], evidence
    if not found.workdir.startswith("gs://"):
        return [] if found.first else [UNREACHED], f"{found.workdir} written and read by every host"
    settings, bucket = found.settings, "gs://" + found.workdir.removeprefix("gs://").partition("/")[0]
    answer = storage(settings, ["buckets", "describe", bucket, "--format=value(location)"])
    if answer.status:
        return [answer.message], ""
    location, region = answer.output.strip().splitlines()[-1].lower(), settings.zone.rpartition("-")[0]
    near = region.startswith(CONTINENTS[location]) if location in CONTINENTS else location == region
    wrong = [] if near else [f"{bucket} is in {location}, the pod in {region}"]
    probe = f"{bucket}/readiness-{secrets.token_hex(4)}"
    for words in (["cp", str(pathlib.Path(__file__)), probe], ["rm", probe]):
        done = storage(settings, words)
        wrong += [f"{bucket}: {done.message}"] if done.status else []
    return wrong, f"{bucket} in {location}, with the pod; written and removed {probe}"


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
    if not (topology and price):
        return [], f"the price of {settings.accel} is not known; set --price=DOLLARS per chip-hour"
    chips = topology.chips
    hour = f"${chips * price:,.2f} an hour for {chips} chips at ${price:.2f} ({topologies.PRICES_AS_OF})"
    if found.first.get("simulated") or len(found.first.get("trained", [])) < 3:
        return [], f"{hour}; the number of hours is unknown, because the steps were simulated"
    seconds = found.first["trained"][2]["step_seconds"] or math.nan
    return [], f"{hour}; ${1000 * seconds / 3600 * chips * price:,.2f} for 1,000 steps of {seconds:.3f} s"


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


def markdown(settings: Settings, items: list[Item], points: list[dict]) -> str:
    """Return the table as a Markdown page, and that of the points of a long run, on which readiness does not depend."""
    ready = "ready" if all(item.ready for item in items) else "NOT ready"
    run = f"{settings.accel}, {settings.transport}, {settings.recipe}; {time.strftime('%F %T %Z')}"
    lines = [f"# {settings.name} is {ready}", "", run, "", "| item | ready | evidence |", "|---|---|---|"]
    for name, is_ready, evidence in items:
        lines.append(f"| {name} | {'yes' if is_ready else '**no**'} | {evidence.replace('|', '/')} |")
    if points:
        lines += ["", "What a long run should have, judged by the step that ran:", "", "| point | verdict | evidence |"]
        lines += ["|---|---|---|"]
    for point in points:
        lines.append(f"| {point['name']} | {point['verdict']} | {point['evidence'].replace('|', '/')} |")
    return "\n".join([*lines, ""])


def _three_steps(settings: Settings, transport: Transport, command: str, scratch: str) -> list[Result]:
    """Train on all hosts, then remove the scratch folder."""
    print(f"training three steps on {transport.num_workers} hosts", flush=True)
    try:
        return transport.run_each(command)
    finally:
        transport.run(hosts.in_code(settings, f"rm -rf {hosts.here(scratch)}"), show=False)
        if "://" in scratch:
            storage(settings, ["rm", "-r", scratch])


def _printed(output: Result) -> Checked | None:
    """Return the answer that a host's script printed; None if there is none, or an invalid one."""
    line = re.search(f"^{MARK}(.*)$", output.output, re.MULTILINE)
    if not line or output.status:
        return None
    with contextlib.suppress(JsonError):
        return parse_json(line[1], Checked, MARK)


def _why(items: list[Item]) -> str:
    """Return the failed items in one line; the items that were not reached because of them come last."""
    failed = [item for item in items if not item.ready]
    reached = [f"{item.name}: {item.evidence[:LONGEST]}" for item in failed if item.evidence != UNREACHED]
    unreached = [item.name for item in failed if item.evidence == UNREACHED]
    return "; ".join(reached + ([f"not reached because of this: {', '.join(unreached)}"] if unreached else []))
