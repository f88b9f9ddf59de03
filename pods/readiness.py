# SPDX-License-Identifier: Apache-2.0
"""Is everything ready to train? Checked on every host, each item with its evidence; a table, and READINESS.md.

Three sources: the pod's own state, a shell command on each host, and scripts/check_host.py, which trains three steps
of the real configuration on all hosts together and restores what they saved.
"""

import dataclasses
import json
import pathlib
import re
import secrets
import shlex
import time

from configs import topologies
from pods import deploy, hosts, launch, recipes, records, watch
from pods.gcloud import storage
from pods.settings import Settings
from pods.switches import Resolved
from pods.transports import PodError, Transport

REPORT = "READINESS.md"
MARK = "CHECKED "  # begins the line of scripts/check_host.py
UNREACHED = "the run on the hosts did not get there"
LONGEST = 200  # characters of an item in the last line
STEPS = [1, 2, 3, 4]  # three, and one after they were restored


@dataclasses.dataclass(frozen=True)
class Item:
    """One line of the table."""

    name: str
    ready: bool
    evidence: str


@dataclasses.dataclass
class Found:
    """What all checks are judged by. `checks` has what each host's script printed, None where it did not get there."""

    settings: Settings
    pod: dict
    workers: list[watch.Worker]
    switches: Resolved
    workdir: str
    outputs: list
    checks: list[dict | None]

    @property
    def first(self) -> dict:
        """What process 0 found."""
        return next((check for check in self.checks if check and check["process"] == 0), {})


def validate(settings: Settings, transport: Transport, rest: list[str]) -> int:
    """Check everything, print the table, leave READINESS.md in the pod's folder; 1 where an item is not ready."""
    settings, switches = recipes.of_pod(settings, transport), recipes.resolved_switches(settings)
    recipes.arguments(settings, recipes.chosen_data_keys(settings) | switches.keys)
    launch.say_not_yet(settings, switches)
    if settings.dry_run:
        transport.run_each(_check_command(settings, transport, switches, _scratch(settings, transport)))
        return 0
    pod = transport.describe()
    if pod is None:
        raise PodError(f"there is no pod {settings.name}; `create` makes it")
    folder = settings.pod_folder
    (folder / REPORT).unlink(missing_ok=True)  # what it says held then
    if settings.transport != "local":
        deploy.check_devices_free(settings, transport)
    found = _find(settings, transport, pod, switches)
    items = [check(found) for check in ITEMS]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REPORT).write_text(markdown(settings, items))
    _show(items)
    print(f"written to {folder / REPORT}")
    if not all(item.ready for item in items):
        raise PodError(f"{settings.name} is not ready: {_why(items)}")
    return 0


def hardware(found: Found) -> Item:
    """The pod is there, healthy, and its hosts see as many chips as its type has."""
    pod, chips = found.pod, recipes.num_chips(found.settings)
    state = ", ".join(filter(None, (pod.get("state"), pod.get("health"), pod.get("acceleratorType"))))
    counts = [check["local_devices"] for check in found.checks if check]
    wrong = [line for line in watch.problems(found.settings, pod, []) if line]
    if counts and sum(counts) != (chips or sum(counts)):
        wrong.append(f"{sum(counts)} devices where {found.settings.accel} has {chips} chips")
    kind = "simulated CPU devices" if found.first.get("simulated") else found.first.get("device_kind", "devices")
    return _item("hardware", wrong, f"{state}; {' + '.join(map(str, counts))} {kind}", bool(counts))


def processes(found: Found) -> Item:
    """Every host's process sees all the others."""
    wrong = [f"worker {n}: {_reason(found.outputs[n])}" for n, check in enumerate(found.checks) if check is None]
    total = sum(check["local_devices"] for check in found.checks if check)
    for number, check in enumerate(found.checks):
        if check and (check["num_processes"], check["num_devices"]) != (len(found.checks), total):
            wrong.append(f"worker {number} sees {check['num_processes']} processes, {check['num_devices']} devices")
    return _item(
        "processes", wrong, f"{len(found.checks)} processes, each sees {found.first.get('num_devices')} devices"
    )


def versions(found: Found) -> Item:
    """The same libraries everywhere, as locked."""
    wrong = _differences(found, "versions")
    wrong += [f"worker {n}: {line}" for n, check in enumerate(found.checks) if check for line in check["not_as_locked"]]
    text = ", ".join(f"{name} {version}" for name, version in found.first.get("versions", {}).items())
    return _item("versions", wrong, text or "unknown", bool(found.first))


def code(found: Found) -> Item:
    """One commit on all hosts, that of this clone, and nothing changed, there or here."""
    commit, changed = records.code_state()
    wrong = [] if commit else ["git does not tell the commit of the code here"]
    wrong += [f"{len(changed)} uncommitted changes here, as {changed[0]}"] if changed else []
    for worker in found.workers:
        if not worker.reachable:
            wrong.append(worker.how())
        elif worker.commit != commit:
            wrong.append(f"worker {worker.number} has commit {worker.commit[:12] or 'none'}, this clone {commit[:12]}")
        elif worker.changed:
            wrong.append(f"worker {worker.number} has {worker.changed} changed files")
    return _item("code", wrong, f"commit {commit[:12]} on {len(found.workers)} hosts and here, no changes")


def mesh(found: Found) -> Item:
    """The mesh of the configuration stands."""
    axes = " * ".join(f"{axis}={size}" for axis, size in found.first.get("mesh", {}).items())
    return _item("mesh", _differences(found, "mesh"), axes or "one device", bool(found.first))


def corpus(found: Found) -> Item:
    """Every host has prepared the same corpus."""
    text = f"{found.first.get('corpus_tokens', 0):,} tokens to train on, digest {found.first.get('corpus', '')[:12]}"
    return _item("data", _differences(found, "corpus"), text, bool(found.first))


def three_steps(found: Found) -> Item:
    """Three steps of the real configuration with each enabled feature on, the loss finite."""
    losses = [line["loss"] for line in found.first.get("trained", [])]
    wrong = [f"losses {losses}"] if losses and (len(losses) < 3 or None in losses) else []
    on = ", ".join(found.switches.on) or "no switch"
    return _item(
        "3-step run", wrong, f"losses {', '.join(f'{loss:.4f}' for loss in losses[:3] if loss)}; on: {on}", bool(losses)
    )


def checkpoint(found: Found) -> Item:
    """What the steps saved was read back, digests and all, and went on."""
    steps, starts = [line["step"] for line in found.first.get("trained", [])], found.first.get("starts")
    wrong = [f"steps {steps}, starts {starts}"] if steps and (steps, starts) != (STEPS, [0, 3]) else []
    return _item(
        "checkpoint", wrong, f"saved at step 3 beside {found.workdir}, restored, went on to step 4", bool(steps)
    )


def storage_place(found: Found) -> Item:
    """The bucket exists, in the pod's region, and can be written; a folder in its place can be written."""
    if not found.workdir.startswith("gs://"):
        return _item("storage", [], f"{found.workdir} written and read by every host", bool(found.first))
    settings, bucket = found.settings, "gs://" + found.workdir.removeprefix("gs://").partition("/")[0]
    answer = storage(settings, ["buckets", "describe", bucket, "--format=value(location)"])
    if answer.status:
        return Item("storage", False, answer.output.strip().splitlines()[-1])
    location, region = answer.output.strip().splitlines()[-1].lower(), settings.zone.rpartition("-")[0]
    wrong = [] if location in (region, "us", "eu", "asia") else [f"{bucket} is in {location}, the pod in {region}"]
    if location in ("us", "eu", "asia") and not region.startswith({"eu": "europe"}.get(location, location)):
        wrong = [f"{bucket} is in {location}, the pod in {region}"]
    probe = f"{bucket}/readiness-{secrets.token_hex(4)}"
    for words in (["cp", str(pathlib.Path(__file__)), probe], ["rm", probe]):
        done = storage(settings, words)
        wrong += [f"{bucket}: {done.output.strip().splitlines()[-1]}"] if done.status else []
    return _item("storage", wrong, f"{bucket} in {location}, with the pod; written and removed {probe}")


def logging(found: Found) -> Item:
    """metrics.jsonl has a whole line for each step, and every process keeps its log."""
    lines = found.first.get("trained", [])
    wrong = [] if all(line["tokens_per_second"] for line in lines) else ["metrics.jsonl has lines without a speed"]
    wrong += [f"worker {n} keeps no log" for n, check in enumerate(found.checks) if check and not check["log"]]
    return _item("metrics and logs", wrong, f"{len(lines)} lines of metrics.jsonl, a log of each process", bool(lines))


def monitoring(found: Found) -> Item:
    """Every worker can be asked how it is, and says so while it trains."""
    wrong = [
        f"worker {n} wrote no heartbeat" for n, check in enumerate(found.checks) if check and not check["heartbeat"]
    ]
    wrong += [worker.how() for worker in found.workers if not worker.reachable]
    return _item(
        "monitoring and recovery", wrong, "heartbeats of all workers; `supervise` restarts what dies", bool(found.first)
    )


def cost(found: Found) -> Item:
    """What the run would cost by what a step took; no figure where it was simulated or has no price."""
    settings, chips = found.settings, recipes.num_chips(found.settings)
    price = watch.price_per_chip_hour(
        dataclasses.replace(settings, transport="gcloud")
    )  # of the pod that this imitates
    if not (chips and price):
        return Item("cost", True, f"the price of {settings.accel} is not known; --price=DOLLARS per chip-hour")
    hour = f"${chips * price:,.2f} an hour for {chips} chips at ${price:.2f} ({topologies.PRICES_AS_OF})"
    if found.first.get("simulated") or not found.first:
        return Item("cost", True, f"{hour}; simulated steps do not tell how many hours")
    seconds = found.first["trained"][2]["step_seconds"]
    return Item(
        "cost", True, f"{hour}; ${1000 * seconds / 3600 * chips * price:,.2f} for 1,000 steps of {seconds:.3f} s"
    )


ITEMS = (
    hardware, processes, versions, code, mesh, corpus, three_steps, checkpoint, storage_place, logging, monitoring,
    cost,
)  # fmt: skip


def markdown(settings: Settings, items: list[Item]) -> str:
    """Return the table as a page."""
    ready = "ready" if all(item.ready for item in items) else "NOT ready"
    when = time.strftime("%F %T %Z")
    rows = [
        f"| {item.name} | {'yes' if item.ready else '**no**'} | {item.evidence.replace('|', '/')} |" for item in items
    ]
    head = [
        f"# {settings.name} is {ready}",
        "",
        f"{settings.accel}, {settings.transport}, {settings.recipe}; {when}",
        "",
    ]
    return "\n".join([*head, "| item | ready | evidence |", "|---|---|---|", *rows, ""])


def _find(settings: Settings, transport: Transport, pod: dict, switches) -> Found:
    """Ask every host, and have all train three steps; the scratch folder of that goes again."""
    scratch = _scratch(settings, transport)
    workers = watch.look(settings, transport, None)
    print(f"training three steps on {len(workers)} hosts", flush=True)
    try:
        outputs = transport.run_each(_check_command(settings, transport, switches, scratch))
    finally:
        transport.run(hosts.in_code(settings, f"rm -rf {watch.here(scratch)}"), show=False)
        if "://" in scratch:
            storage(settings, ["rm", "-r", scratch])
    lines = [re.search(f"^{MARK}(.*)$", output.output, re.MULTILINE) for output in outputs]
    checks = [
        json.loads(line[1]) if line and not output.status else None for line, output in zip(lines, outputs, strict=True)
    ]
    return Found(settings, pod, workers, switches, _run_folder(settings, transport), outputs, checks)


def _run_folder(settings: Settings, transport: Transport) -> str:
    return settings.run_folder(transport.num_workers)


def _scratch(settings: Settings, transport: Transport) -> str:
    """Return a folder beside that of the run, of this call alone."""
    return f"{_run_folder(settings, transport).rstrip('/')}-readiness-{secrets.token_hex(3)}"


def _check_command(settings: Settings, transport: Transport, switches, scratch: str) -> str:
    keys = recipes.chosen_data_keys(settings) | switches.keys
    words = [hosts.python(settings), "scripts/check_host.py", *recipes.arguments(settings, keys, (), scratch)]
    return hosts.in_environment(settings, shlex.join(words))


def _differences(found: Found, key: str) -> list[str]:
    """Return a line for each worker that tells something else than the first."""
    told = [(number, check[key]) for number, check in enumerate(found.checks) if check]
    return [f"worker {n} has other {key} than worker {told[0][0]}: {value}" for n, value in told if value != told[0][1]]


def _item(name: str, wrong: list[str], evidence: str, found: bool = True) -> Item:
    wrong = wrong or ([] if found else [UNREACHED])
    return Item(name, not wrong, "; ".join(wrong) if wrong else evidence)


def _why(items: list[Item]) -> str:
    """Return what failed where, in a line; last the items that were not reached because of the others."""
    failed = [item for item in items if not item.ready]
    reached = [f"{item.name}: {item.evidence[:LONGEST]}" for item in failed if item.evidence != UNREACHED]
    unreached = [item.name for item in failed if item.evidence == UNREACHED]
    return "; ".join(reached + ([f"and so not reached: {', '.join(unreached)}"] if unreached else []))


def _reason(result) -> str:
    """Return the last line that a host said before it failed."""
    said = [line for line in result.output.splitlines() if line.strip()]
    return said[-1].removeprefix("error: ")[:300] if said else f"exit status {result.status}"


def _show(items: list[Item]) -> None:
    """Print the table."""
    print(
        "\n".join(watch.aligned([[item.name, "ready" if item.ready else "NOT READY", item.evidence] for item in items]))
    )
