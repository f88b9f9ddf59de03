# SPDX-License-Identifier: Apache-2.0
"""Does a run keep its promises under every fault? Faults strike real processes, and the same command restarts them.

For each fault it measures the seconds until detection and the number of repeated steps. It checks whether the message
names the right process and phase (null if there is none to name). It checks whether the run ends with the parameters,
the optimizer state and the losses of an undisturbed run, bit for bit (null if this is not promised). Then one run is
killed at 25 random moments. The steps are tiny, so the times are those of detecting and starting, not of training.
"""

import collections
import contextlib
import dataclasses
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import support

if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", support.QUICK_COMPILATION)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

from tests import groups
from checkpointing import manifest

HOST = re.escape(socket.gethostname())
STEPS, SAVE_EVERY, STRIKE = 30, 5, 12  # the step at which most faults strike
HANG_SECONDS = 10
STARTS = 4  # of one run, at most
POLL_SECONDS = 0.02
ENDS_SECONDS = 600  # that processes have to end
ROWS = 64
KEYS = {
    "model.num_layers": 1, "model.embed_dim": 64, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 128,
    "model.vocab_size": 300, "model.max_length": 64, "train.sequence_length": 64, "train.global_batch": ROWS,
    "train.steps": STEPS, "train.log_every": 1, "train.eval_every": 10, "train.save_every": SAVE_EVERY,
    "optimizer.warmup_steps": 2, "optimizer.learning_rate": 0.003, "evaluation.sample_tokens": 0,
    "evaluation.batches": 3, "data.holdout_fraction": 0.3, "data.tokenizer": "byte", "logging.tensorboard": False,
    "logging.report": False,
    "train.hang_seconds": HANG_SECONDS,  # longer than it takes to compile what evaluates
}  # fmt: skip
OF_FOUR = {"mesh.data": 2, "mesh.fsdp": 2}
HISTORY = {"train": ("loss", "gradient_norm", "learning_rate", "total_tokens"), "eval": ("eval_loss", "eval_tokens")}


class Watched:
    """A process whose lines are kept, each with the time.monotonic() of its arrival."""

    def __init__(self, process):
        """Read from now on what a process started by tests/groups.py prints."""
        self.process, self.out, self.err = process, [], []
        streams = ((process.stdout, self.out), (process.stderr, self.err))
        self.readers = [threading.Thread(target=_read, args=both, daemon=True) for both in streams]
        for reader in self.readers:
            reader.start()

    def came(self, pattern: str) -> float | None:
        """Return the time of the first line that matches a pattern."""
        found = [when for when, line in [*self.out, *self.err] if re.search(pattern, line)]
        return min(found, default=None)

    @property
    def steps(self) -> int:
        """The number of printed steps."""
        return sum(bool(re.match(r"step +\d+/", line)) for _, line in [*self.out])

    @property
    def is_over(self) -> bool:
        """Return whether it has ended or is frozen."""
        if self.process.poll() is not None:
            return True
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stat = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "T"
        return True

    def end(self) -> None:
        """Kill it if it still runs; return when all its lines are read."""
        self.process.kill()
        self.process.wait()
        for reader in self.readers:
            reader.join()

    @property
    def status(self) -> int | None:
        """The exit status: negative for a signal, None while it runs."""
        return self.process.returncode

    @property
    def last_line(self) -> str:
        """The last line on stderr."""
        return next((line for _, line in reversed(self.err) if line), "")


def _read(stream, lines: list[tuple[float, str]]) -> None:
    for line in stream:
        lines.append((time.monotonic(), line.rstrip()))


def started(
    place: pathlib.Path, workdir: str, *, count: int = 1, faults: str = "", port: int | None = None,
    absent: Sequence[int] = (), **changes,
) -> list[Watched]:  # fmt: skip
    """Start train.py on the texts of `place`; `changes` are keys with __ for the dot; the rest as in groups.start."""
    values = KEYS | {"data.path": f"{place}/texts/*.txt"} | (OF_FOUR if count > 1 else {})
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    injected = [f"--faults={faults}"] if faults else []
    arguments = ["train.py", f"--workdir={place / workdir}", *injected, *support.typed(values)]
    if count == 1:
        return [Watched(groups.start_alone(arguments, cache=place / "cache"))]
    how = {"count": count, "cache": place / "cache", "devices": 4, "port": port, "absent": absent}
    return [Watched(process) for process in groups.start(arguments, **how)]


def until_ended(processes: list[Watched]) -> None:
    """Return when all processes have ended; frozen ones are killed when the others have ended.

    Raises:
      RuntimeError: a process did not end and was killed.
    """
    deadline = time.monotonic() + ENDS_SECONDS
    while (late := [process for process in processes if not process.is_over]) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for process in processes:
        process.end()
    if late:
        raise RuntimeError(f"{len(late)} of {len(processes)} processes did not end within {ENDS_SECONDS} s")


def history(workdir: pathlib.Path) -> dict[tuple[str, int], list]:
    """Return the last losses and other scalars of each (kind, step)."""
    lines = support.lines_of(workdir, *HISTORY)
    return {(line["kind"], line["step"]): [line[name] for name in HISTORY[line["kind"]]] for line in lines}


def newest(workdir: pathlib.Path) -> pathlib.Path:
    """Return the folder of the newest checkpoint."""
    return workdir / "checkpoints" / str(support.checkpoints(workdir)[-1])


def final_arrays(workdir: pathlib.Path) -> dict[str, list]:
    """Verify the newest checkpoint and return the digests of its array files."""
    folder = newest(workdir)
    problems = manifest.problems(folder)
    if problems:
        raise ValueError(f"{folder}: {problems[0]}")
    files = manifest.read(folder)["files"].items()
    return {name: digest for name, digest in files if re.search(r"/(\.zarray|\d+(\.\d+)*)$", name)}


def differences(workdir: pathlib.Path, calm: pathlib.Path) -> list[str]:
    """Return a line for each difference between the ends of a run and of an undisturbed run."""
    one, other = history(workdir), history(calm)
    found = [f"{key}: {one.get(key)} instead of {other.get(key)}" for key in other if one.get(key) != other[key]]
    one, other = final_arrays(workdir), final_arrays(calm)
    return found + [f"{name} differs" for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]


@dataclasses.dataclass(frozen=True)
class Case:
    """A fault and its expected effects.

    Attributes:
      name: of the case and of its workdir.
      faults: value of --faults.
      told: pattern of the line that reports the fault; "" if a process dies alone and none is printed.
      culprit: pattern that names the culprit. It is searched in the last line of each process that ended by itself with
        an error; if there is none, in all output of the first process.
      status: exit status of the processes that the fault does not kill.
      count: number of processes.
      act: strikes from outside: it gets the processes, and returns the time.
      between: changes the workdir before the restart.
      exact: whether the end must equal that of an undisturbed run.
      events: the expected numbers of events in metrics.jsonl.
      changes: of the configuration.
    """

    name: str
    faults: str
    told: str = ""
    culprit: str = ""
    status: int = 1
    count: int = 1
    act: Callable[[list[Watched]], float] | None = None
    between: Callable[[pathlib.Path], None] | None = None
    exact: bool = True
    events: dict[str, int] = dataclasses.field(default_factory=dict)
    changes: dict = dataclasses.field(default_factory=dict)


def interrupt(processes: list[Watched]) -> float:
    """Send SIGINT to the first process after some steps, as Ctrl-C does."""
    while not processes[0].came(rf"^step +{STRIKE}/") and not processes[0].is_over:
        time.sleep(POLL_SECONDS)
    processes[0].process.send_signal(signal.SIGINT)
    return time.monotonic()


def flip_a_bit_of_the_newest(workdir: pathlib.Path) -> None:
    """Damage the largest file of the newest checkpoint."""
    files = [path for path in newest(workdir).rglob("*") if path.is_file()]
    victim = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 4
    victim.write_bytes(content)


def hang(phase: str, process: int = 2, count: int = 4) -> Case:
    """Return the case of a process that stops for good in a phase."""
    where = rf"process {process} \({HOST}\) has been in {phase} of step \d+ for [\d.]+ s"
    named = rf"no step ended within {HANG_SECONDS} s: {where}"
    return Case(f"hang_{phase}_of_{count}", f"hang:{phase}:{process}@{STRIKE}", "no step ended", named, count=count)


PHASES = ("data", "step", "evaluation", "save")
# Where it was is what its last sign said, of up to a second and many of these steps ago.
SILENT = rf"process 2 \({HOST}\) has sent no heartbeat for [\d.]+ s; it was in \w+ of step \d+"
CASES = [
    Case("kill", f"kill@{STRIKE}"),
    Case("sigterm", f"sigterm@{STRIKE}", "saved at step", status=75),
    Case("sigint", "", "saved at step", status=75, act=interrupt),
    Case("nan", f"nan@{STRIKE}", rf"step {STRIKE}: update skipped", status=0, exact=False,
         events={"update_not_taken": 1, "roll_back": 0}),
    Case("nan_going_back", f"nan@{STRIKE}", rf"back to step \d+, leaving out {ROWS} examples", status=0, exact=False,
         events={"update_not_taken": 1, "roll_back": 1}, changes={"train__bad_steps": 1}),
    Case("full_disk", "full_disk:9@8", "could not be saved: .*File too large", status=0),
    Case("damaged_checkpoint", f"kill@{STEPS - 2}", r"checkpoint \d+ is damaged: \S+ has other bytes than were saved",
         between=flip_a_bit_of_the_newest),
    Case("kill_of_4", f"kill:2@{STRIKE}", "died", rf"process 2 of 4 \({HOST}\) died", count=4),
    Case("sigterm_of_4", f"sigterm:2@{STRIKE}", "saved at step", status=75, count=4),
    Case("flip_of_4", f"flip:2@{STRIKE}", "gave different bits",
         rf"gave different bits when computed twice, on device \d+ of process 2 \({HOST}\)",
         count=4, changes={"train__recheck_every": 4}),
    *map(hang, PHASES),
    Case("freeze_of_4", f"freeze:2@{STRIKE}", "no step ended", SILENT, count=4),
    Case("slow_of_4", "slow:2x30@4", "is slow", rf"process 2 \({HOST}\) is slow: it spends .* per step in step",
         status=0, count=4, changes={"train__hang_seconds": 0}),  # the report takes two windows of ten seconds
]  # fmt: skip
HANDFUL = ("kill", "damaged_checkpoint", "kill_of_4", "hang_data_of_4")


def train_calmly(place: pathlib.Path, cases: Iterable[Case]) -> None:
    """Train the undisturbed runs for comparison."""
    for count in sorted({case.count for case in cases}):
        processes = started(place, f"calm-{count}", count=count, train__hang_seconds=0)
        until_ended(processes)
        if any(process.status for process in processes):
            raise RuntimeError(processes[0].last_line)


def strike(case: Case, place: pathlib.Path) -> dict:
    """Strike a run, restart it until it ends, and return the figures; `place` has the undisturbed runs."""
    workdir = place / case.name
    runs = [started(place, case.name, count=case.count, faults=case.faults, **case.changes)]
    by_us = case.act(runs[0]) if case.act else None
    until_ended(runs[0])
    struck = by_us or when(runs[0], "^fault: ")
    if struck is None:
        raise RuntimeError(f"{case.name}: the fault did not strike: {[process.last_line for process in runs[0]]}")
    if case.between:
        case.between(workdir)
    while any(process.status for process in runs[-1]) and len(runs) < STARTS:
        runs.append(started(place, case.name, count=case.count, faults=case.faults, **case.changes))
        until_ended(runs[-1])
    steps = support.steps_of(workdir)
    found = differences(workdir, place / f"calm-{case.count}")
    # Damage is there from the moment when the second process begins, which is not what its discovery takes.
    told = None if case.between else when(runs[0], case.told) if case.told else None
    missing = _broken_promises(case, runs, workdir, found)
    print(f"{case.name}: {'; '.join(missing) or 'as promised'}", flush=True)
    return {
        "detected_after_seconds": told and round(told - struck, 1),
        "lost_steps": len(steps) - len(set(steps)),
        "right_culprit": all(re.search(case.culprit, said) for said in _said(runs[0])) if case.culprit else None,
        "final_loss_equal": not found if case.exact else None,
        "as_promised": not missing,
    }


def when(processes: list[Watched], pattern: str) -> float | None:
    """Return the time of the first line of any process that matches a pattern."""
    times = [process.came(pattern) for process in processes]
    return min((found for found in times if found is not None), default=None)


def _said(processes: list[Watched]) -> list[str]:
    """Return the last line of each process that ended by itself with an error, else all output of the first one."""
    ended = [process.last_line for process in processes if process.status and process.status > 0]
    return ended or ["\n".join(line for _, line in processes[0].out)]


def _broken_promises(case: Case, runs: list[list[Watched]], workdir: pathlib.Path, found: list[str]) -> list[str]:
    """Return a line for each broken promise."""
    first = [process.status for process in runs[0] if process.status >= 0]
    broken = [f"ended with status {status}" for status in first if status != case.status]
    broken += [f"start {len(runs)} ended with {runs[-1][0].last_line!r}"] if runs[-1][0].status else []
    if case.told and not any(when(processes, case.told) for processes in runs):
        broken.append(f"nobody said {case.told!r}")
    broken += [f"said {said!r}" for said in _said(runs[0]) if case.culprit and not re.search(case.culprit, said)]
    counts = collections.Counter(line.get("event") for line in support.lines_of(workdir))
    broken += [f"{counts[event]} events {event}" for event, number in case.events.items() if counts[event] != number]
    losses = [values[0] for values in history(workdir).values()]
    broken += ["a loss is not a number"] if case.events.get("roll_back") and None in losses else []
    return broken + (found[:3] if case.exact else [])


# Where a run is killed: what is waited for, after some steps, and for how many seconds more at most.
Reached = Callable[[Watched, pathlib.Path], object]
MOMENTS: dict[str, tuple[Reached, float]] = {
    "start_up": (lambda process, workdir: True, 8.0),
    "corpus": (lambda process, workdir: process.came("^training a SentencePiece tokenizer"), 2.0),
    "step": (lambda process, workdir: True, 0.3),
    "save": (lambda process, workdir: any((workdir / "checkpoints").glob("*.unfinished")), 0.1),
    "evaluation": (lambda process, workdir: re.match(r"step +\d*0/", process.out[-1][1]), 0.05),
}
MOST_STEPS = 20  # that are waited for
OF_KILLS = {  # long enough for 25 times some steps; the corpus takes a while
    "train__steps": 400, "train__save_every": 10, "data__tokenizer": "sentencepiece", "train__hang_seconds": 0,
}  # fmt: skip


def kill_again_and_again(
    place: pathlib.Path, kills: int, *, moments: Sequence[str] = tuple(MOMENTS), seed: int = 0, **changes
) -> dict:
    """Kill a run at random moments, and compare its end with that of an undisturbed run.

    Args:
      place: has the texts, and afterwards the workdirs "killed" and "never-killed".
      kills: number of kills.
      moments: each is used equally often, in a random order.
      changes: of the configuration, keys with __ for the dot.
    """
    rng, changes = random.Random(seed), OF_KILLS | changes
    calm = started(place, "never-killed", **changes)
    until_ended(calm)
    chosen = [moments[number % len(moments)] for number in range(kills)]
    rng.shuffle(chosen)
    struck = [moment for moment in chosen if kill_at(moment, place, rng, changes)]
    last = started(place, "killed", **changes)
    until_ended(last)
    if calm[0].status or last[0].status:
        raise RuntimeError(calm[0].last_line or last[0].last_line)
    steps, found = support.steps_of(place / "killed"), differences(place / "killed", place / "never-killed")
    for line in found[:10]:
        print(f"killed: {line}", flush=True)
    return {
        "kills": len(struck),
        **{f"kills_in_{moment}": struck.count(moment) for moment in MOMENTS},
        "lost_steps": len(steps) - len(set(steps)),
        "identical": not found,
    }


def kill_at(moment: str, place: pathlib.Path, rng: random.Random, changes: dict) -> bool:
    """Start the run and kill it at a moment; return whether it was still running."""
    if moment == "corpus":
        for made in ("shards", "tokenizers"):
            shutil.rmtree(place / "cache" / "torus" / made, ignore_errors=True)
    (process,) = started(place, "killed", **changes)
    reached, longest = MOMENTS[moment]
    steps = 0 if moment in ("start_up", "corpus") else rng.randint(1, MOST_STEPS)
    while process.process.poll() is None and (process.steps < steps or not reached(process, place / "killed")):
        time.sleep(POLL_SECONDS / 10)
    time.sleep(rng.uniform(0, longest))
    process.end()
    steps = support.steps_of(place / "killed")
    print(f"killed in {moment}, at step {steps[-1] if steps else 0}: status {process.status}", flush=True)
    return process.status == -signal.SIGKILL


def main() -> None:
    """Run all cases, then the random kills; report and count."""
    cases, kills = (CASES, 25) if not support.QUICK else ([case for case in CASES if case.name in HANDFUL], 3)
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        support.write_texts(place)
        try:
            train_calmly(place, cases)
            faults = {case.name: strike(case, place) for case in cases}
            resumed = kill_again_and_again(place, kills)
        finally:
            groups.end_all()
    kept = sum(found["as_promised"] for found in faults.values())
    support.finish("faults", {"as_promised": f"{kept} of {len(faults)}", **faults, **resumed})
    if kept < len(faults) or not resumed["identical"] or resumed["kills"] < kills:
        sys.exit("a promise was broken, see above")


if __name__ == "__main__":
    main()
