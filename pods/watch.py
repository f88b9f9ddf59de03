# SPDX-License-Identifier: Apache-2.0
"""Reports every worker's process, step and memory, and the progress, speed and cost of the run.

`look` makes one call for each worker, so an unreachable worker does not hide others. Times are compared on the clock of
the host that wrote them.
"""

import dataclasses
import json
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable

from files.json_reader import JsonError, parse_json
from files.terminal import is_live
from pods import hosts, recipes, records, studies
from pods.answers import Answer, Configuration
from pods.errors import PodError
from pods.settings import Settings
from pods.transports import Transport
from reporting.display import aligned, counted
from reporting.metrics import parse_lines, steps_of

WATCH_SECONDS = 1.0
LOOK_SECONDS = 120.0  # for the answer of a worker: ssh of gcloud may try ten times
IDLE = "nothing runs"  # nothing is launched, or it was stopped
RECENT_LINES = 20  # the seconds of a step are the median of these
KILLED = 128  # a shell adds the number of the signal to this status
NOT_THERE = re.compile("No such file|matched no objects")  # messages of cat and of gcloud
PATIENCE = {"training": 1, "saving": 6, "sampling": 6}  # times hang_seconds that a heartbeat's phase may last
COPIED = ("alive", "stopped", "status", "commit", "changed", "rss_gib")  # from an answer to a Worker


@dataclasses.dataclass(frozen=True)
class Worker:
    """The state of a worker; `reachable` is false if its host does not answer."""

    number: int
    reachable: bool = True
    error: str = ""
    alive: bool = False
    launched: bool = False  # whether something was launched and has not been stopped by pod.py since
    stopped: bool = False  # whether `pod.py stop` was called since the launch
    trains: bool = False  # whether a run of train.py was launched; it writes heartbeats once its step is compiled
    status: int | None = None  # exit status of the program; None while it runs, or if it is unknown
    commit: str = ""
    changed: int = 0
    rss_gib: float = 0.0
    heartbeat: dict | None = None  # the last of train.py in this run, see answers.Heartbeat; None before the first
    age: float | None = None  # seconds since the heartbeat was written

    @property
    def step(self) -> int | None:
        """The last completed step."""
        return self.heartbeat["step"] if self.heartbeat else None

    @property
    def died(self) -> bool:
        """Whether the program ended without having finished or having been asked to stop."""
        ended = self.reachable and self.launched and not self.alive
        return ended and not self.stopped and self.status not in (0, hosts.SAVED)

    def process(self) -> str:
        """Return the state of the process in a word or two."""
        if not self.reachable:
            return "unreachable"
        if self.alive:
            return self.heartbeat["phase"] if self.heartbeat else "starting" if self.trains else "running"
        if not (self.launched or self.stopped) and self.status is None:
            return IDLE
        return "died" if self.died else "finished" if self.status == 0 else "stopped"

    def trouble(self) -> str:
        """Return the worker's problem in one line."""
        if not self.reachable:
            return f"worker {self.number} is unreachable: {self.error}"
        if self.status is None:
            return f"worker {self.number} died and left no exit status"
        signal = f" (signal {self.status - KILLED})" if self.status > KILLED else ""
        return f"worker {self.number} ended with status {self.status}{signal}"


def look(settings: Settings, transport: Transport, record: dict | None) -> list[Worker]:
    """Return the state of every worker; `record` is the launch (records.read) whose heartbeats are read."""
    workdir = record["workdir"] if record else None
    command = hosts.status_line(settings, heartbeat_path(workdir) if workdir else "")
    results = transport.run_each(command, limit_s=LOOK_SECONDS)
    return [_worker(index, result, record) for index, result in enumerate(results)]


def heartbeat_path(workdir: str) -> str:
    """Return the path of a worker's heartbeat file on its host, with $W for its number."""
    return f"{hosts.here(workdir)}/workers/$W.json"


def problems(settings: Settings, pod: dict | None, workers: list[Worker], *, launched: bool = False) -> list[str]:
    """Return problems, one line each; [] if all workers run, or all finished, or all were stopped.

    Args:
      launched: whether a program was launched; if so, each worker must have a trace of it.
    """
    found = []
    if pod is None:
        return [f"there is no pod {settings.name}"]
    if pod.get("state") != "READY":
        found.append(f"the pod is {pod.get('state')}")
    if pod.get("health", "HEALTHY") not in ("HEALTHY", "HEALTH_UNSPECIFIED"):
        found.append(f"the pod's health is {pod['health']}")
    found += [worker.trouble() for worker in workers if not worker.reachable or worker.died]
    lost = [worker.number for worker in workers if launched and worker.process() == IDLE]
    found += [f"worker {number} does not have the launched program; `restart` launches it" for number in lost]
    found += [hanging for worker in workers if (hanging := hangs(settings, worker))]
    reached = [worker for worker in workers if worker.reachable]
    for what, values in {
        "whether their process runs": {worker.number: worker.alive for worker in reached},
        "the commit of their code": {worker.number: worker.commit[:12] for worker in reached},
        "the code that runs": {worker.number: worker.heartbeat["code"] for worker in reached if worker.heartbeat},
    }.items():
        if len(set(values.values())) > 1:
            found.append(f"workers differ in {what}: " + ", ".join(f"{n}: {value}" for n, value in values.items()))
    return found


def builds(settings: Settings, worker: Worker) -> bool:
    """Return whether a worker rebuilds lost data and made progress recently; the other workers wait for it."""
    heartbeat, limit = worker.heartbeat, settings.hang_seconds
    return worker.alive and worker.age is not None and heartbeat["phase"] == "building" and worker.age <= limit


def hangs(settings: Settings, worker: Worker) -> str:
    """Return a line if a worker trains, saves or samples and its last step is too long ago, else ""."""
    patience = PATIENCE.get(worker.heartbeat["phase"]) if worker.alive and worker.age is not None else None
    if patience is None or worker.age <= patience * settings.hang_seconds:
        return ""
    return f"worker {worker.number} hangs: step {worker.step} was {worker.age:.0f} s ago"


def status(settings: Settings, transport: Transport, rest: list[str]) -> int:
    """Print the state of the pod and of every worker; return 1 if there is a problem, with the first one on stderr."""

    def picture() -> tuple[str, str]:
        record = records.read(settings) if records.launched(settings) else None
        pod = transport.describe()
        record = studies.with_progress(settings, transport, record) if record and pod else record
        workers = look(settings, transport, record) if pod else []
        wrong = problems(settings, pod, workers, launched=record is not None)
        first = next(iter(wrong), "")
        if settings.json:
            rows = [dataclasses.asdict(worker) | {"process": worker.process()} for worker in workers]
            return json.dumps({"pod": pod, "launched": record, "workers": rows, "problems": wrong}), first
        table = ["", *aligned(_rows(workers))] if workers else []
        lines = [*_heading(settings, pod, record), *table, *[f"PROBLEM: {line}" for line in wrong]]
        return "\n".join(lines), first

    return _show(settings, picture)


def metrics(settings: Settings, transport: Transport, rest: list[str]) -> int:
    """Print the progress, speed and cost of the run."""
    if settings.dry_run:
        workdir = records.read(settings)["workdir"] if records.launched(settings) else ""
        workdir = workdir or settings.run_folder()
        for name in ("metrics.jsonl", "config.json"):
            transport.run(hosts.read_command(settings, workdir, name), worker="0")
        return 0
    record = records.read(settings)
    if not (record["workdir"] or record.get("study")):
        raise PodError(f"the launched program is not a run of train.py: {shlex.join(record['words'])}")
    settings = recipes.of_pod(settings, transport)
    price, topology = price_per_chip_hour(settings), recipes.preset(settings)
    chips = topology.chips if topology else None

    def picture() -> tuple[str, str]:
        try:
            workdir, began = studies.trained_now(settings, transport, record)
            lines, config = _read_run(settings, transport, workdir)
        except PodError as error:
            if settings.watch and record.get("study"):  # the next trial has not trained yet
                return str(error), str(error)
            raise
        figures = summarise(lines, config["train_steps"], chips, price, began)
        if settings.json:
            return json.dumps(figures), ""
        return "\n".join(aligned([[name, _figure(name, value)] for name, value in figures.items()])), ""

    return _show(settings, picture)


def summarise(
    lines: list[dict], last_step: int | None, chips: int | None, price: float | None, launched: float | None = None
) -> dict:
    """Return the figures of a run from the lines of its metrics.jsonl, in the order in which they were written.

    Hours are the sum over the run's processes, each from its start (the newest from its launch) to its last line.
    Unknown figures are None.

    Args:
      price: dollars per chip-hour.
      launched: when the newest process was launched (Unix seconds).
    """
    trained, evaluated = steps_of(lines, "train"), steps_of(lines, "eval")
    last = trained[-1] if trained else {}
    recent = [seconds for line in trained[-RECENT_LINES:] if (seconds := line.get("step_seconds")) is not None]
    steps_left = max(0, last_step - last["step"]) if last and last_step else None
    hours = elapsed_seconds(lines, launched) / 3600
    chip_hours = hours * chips if chips else None
    return {
        "step": last.get("step"),
        "steps": last_step,
        "loss": last.get("loss"),
        "eval_loss": evaluated[-1].get("eval_loss") if evaluated else None,
        "tokens_per_second": last.get("tokens_per_second"),
        "mfu": last.get("mfu"),
        "goodput": last.get("goodput"),
        "seconds_left": steps_left * statistics.median(recent) if steps_left is not None and recent else None,
        "hours": hours,
        "chip_hours": chip_hours,
        "cost_dollars": chip_hours * price if chip_hours is not None and price is not None else None,
    }


def elapsed_seconds(lines: list[dict], launched: float | None = None) -> float:
    """Return how long the processes of the run lived according to metrics.jsonl, each from its start.

    The start is written after the compilation. The newest process's compilation counts if `launched` is known.
    """
    total, before, compiled = 0.0, None, 0.0
    for line in (line for line in lines if "time" in line):
        starts = line.get("event") == "start"
        total += 0.0 if starts or before is None else max(0.0, line["time"] - before)  # a clock may be set back
        if starts:
            known = launched is not None and (before or 0.0) <= launched <= line["time"]
            compiled = line["time"] - launched if known else 0.0
        before = line["time"]
    return total + compiled


def price_per_chip_hour(settings: Settings) -> float | None:
    """Return --price, which may be 0, else that of the preset; None if there is none, or if the chips are simulated."""
    topology = None if settings.transport == "local" else recipes.preset(settings)
    listed = topology.price_per_chip_hour if topology else None
    return settings.price if settings.given("price") else listed


def _worker(number: int, result, record: dict | None) -> Worker:
    """Return a worker from its answer; heartbeats of an earlier run are ignored."""
    found = [line for line in result.output.splitlines() if line.startswith("{") and line.endswith("}")]
    if result.status or not found:
        return Worker(number, reachable=False, error=result.message[:200])
    try:
        answer = parse_json(found[-1], Answer, "its answer")
    except JsonError as error:
        damaged = "; is its heartbeat file damaged?" if "heartbeat" in str(error) or "JSON" in str(error) else ""
        return Worker(number, reachable=False, error=f"{error}{damaged}"[:200])
    beat = answer["heartbeat"]
    if beat and answer["started"] and beat["time"] < answer["started"] - 1:
        beat = None
    age = max(0.0, answer["now"] - beat["time"]) if beat else None
    return Worker(
        number, launched=answer["pid"] is not None, trains=record is not None and bool(record["workdir"]),
        heartbeat=beat, age=age, **{key: answer[key] for key in COPIED},
    )  # fmt: skip


def _heading(settings: Settings, pod: dict | None, record: dict | None) -> list[str]:
    state = "does not exist"
    if pod:
        parts = (pod.get("state", "?"), pod.get("health"), pod.get("acceleratorType"))
        state = ", ".join([*filter(None, parts), counted(pod["workers"], "worker")])
    lines = [f"pod {settings.name}: {state} ({settings.transport})"]
    if record is None:
        return [*lines, "launched: nothing"]
    when = time.strftime("%F %T", time.localtime(record["time"]))
    lines.append(f"launched: {record['subcommand']} at {when}, commit {record['commit'][:12]}, {studies.what(record)}")
    lines += studies.lines(record)
    if record["switches"]:
        on, left_out = (", ".join(record["switches"].get(key, ())) or "none" for key in ("on", "left_out"))
        lines.append(f"switches on: {on}; left out: {left_out}")
    return lines


def _rows(workers: list[Worker]) -> list[list[str]]:
    rows = [["worker", "process", "step", "step age", "host GiB", "device GiB", "commit", "code that runs"]]
    for worker in workers:
        beat = worker.heartbeat or {}
        devices = beat.get("device_memory_gib")
        rows.append([
            str(worker.number),
            worker.process() + (f" (status {worker.status})" if worker.died and worker.status is not None else ""),
            str(beat.get("step", "-")),
            f"{worker.age:.1f} s" if worker.age is not None else "-",
            f"{beat.get('host_memory_gib', worker.rss_gib):.2f}",
            " ".join(f"{gib:.1f}" for gib in devices) if devices else "-",
            worker.commit[:12] + (f" +{worker.changed} files" if worker.changed else ""),
            beat.get("code", "-"),
        ])  # fmt: skip
    return rows


def _read_run(settings: Settings, transport: Transport, workdir: str) -> tuple[list[dict], dict]:
    """Return the lines of a run's metrics.jsonl, without a torn last one, and its flat configuration."""

    def read(name: str) -> str:
        command = hosts.read_command(settings, workdir, name)
        [result] = transport.run(command, worker="0", show=False)  # process 0 writes it
        if result.status and NOT_THERE.search(result.message):
            raise PodError(f"{workdir} has no {name} before the first logged step; `status` shows the current state")
        if result.status:
            raise PodError(f"{workdir}/{name}: {result.message}")
        return result.output

    try:
        lines = parse_lines(read("metrics.jsonl").encode(errors="replace"), f"{workdir}/metrics.jsonl")
        return lines, parse_json(read("config.json"), Configuration, f"{workdir}/config.json")
    except JsonError as error:
        raise PodError(str(error)) from None


def _figure(name: str, value) -> str:
    if value is None:
        return "unknown"
    if name == "seconds_left":
        return time.strftime("%H:%M:%S", time.gmtime(value)) if value < 86400 else f"{value / 86400:.1f} days"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _show(settings: Settings, picture: Callable[[], tuple[str, str]]) -> int:
    """Print a picture, and a problem to stderr; return the exit status. With --watch repeat it, on a terminal in place.

    `picture` returns the text and a problem, "" if there is none.
    """
    if settings.dry_run:  # the calls print themselves
        picture()
        return 0
    if not settings.watch:
        text, problem = picture()
        print(text, flush=True)
        if problem:
            print(f"error: {problem}", file=sys.stderr)
        return int(bool(problem))
    seconds = settings.poll_seconds if settings.given("poll_seconds") else WATCH_SECONDS
    if not is_live(sys.stdout):
        while True:
            print(picture()[0] + "\n", flush=True)
            time.sleep(seconds)
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        while True:
            live.update(Text(picture()[0]), refresh=True)
            time.sleep(seconds)
