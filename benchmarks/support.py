# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the benchmarks: the machine, and the JSON line that each prints last."""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
QUICK = "--quick" in sys.argv
# of all benchmarks but those that parse their own
OPTIONS = ("--quick", "--text=", "--exhaustive", "--mechanism=")
OF_ONE = OPTIONS[1:]  # which not every benchmark reads
PARSES_ITS_OWN = ("docs", "interactions", "levers", "record", "same_programs", "search_grid", "story")
SERVER_ENDS_SECONDS = 1800
CLOSING_KEY = "benchmark"
CLOSING = f'{{"{CLOSING_KEY}": '  # how the closing line begins
QUIET = {  # for a run that only needs steps and held-out loss
    "train.eval_every": 0, "train.save_every": 0, "evaluation.sample_tokens": 0, "logging.tensorboard": False,
    "logging.report": False,
}  # fmt: skip
QUICK_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # of XLA_FLAGS
COMPARED = ("sentencepiece", "torch")  # more libraries whose versions a figure depends on


def check_options(arguments: Sequence[str]) -> None:
    """End with one line and status 2 for an unknown option, before hours of work."""
    words = tuple(option for option in OPTIONS if option.endswith("="))
    if unknown := [word for word in arguments if word not in OPTIONS and not word.startswith(words)]:
        usage_error(f"{unknown[0]} is not an option of a benchmark; there are {', '.join(OPTIONS)}")


def mechanism_is_on() -> bool:
    """Return whether the mechanism of a benchmark is on, as it is by default; a usage error for other words."""
    words = {word.removeprefix("--mechanism=") for word in sys.argv if word.startswith("--mechanism=")} or {"on"}
    if words not in ({"on"}, {"off"}):
        usage_error(f"--mechanism={' and '.join(sorted(words))} is neither on nor off")
    return words == {"on"}


class Parser(argparse.ArgumentParser):
    """A parser of a benchmark's own options; a mistake is one line."""

    def __init__(self, description: str):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """End with a line about the arguments, and status 2."""
        usage_error(f"{message}; --help lists the options")


def usage_error(line: str) -> NoReturn:
    """End with a line about the arguments, and status 2."""
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)


def finish(name: str, figures: dict) -> None:
    """Print the closing line of a benchmark."""
    from cluster import identity

    versions = identity.versions() | identity.installed(COMPARED)
    told = {CLOSING_KEY: name, "quick": QUICK, "figures": figures, "versions": versions, "machine": machine()}
    print(json.dumps(told), flush=True)


def judge(name: str, figures: dict, missed: str = "") -> None:
    """Print the closing line, and then end with status 1 if a goal is missed."""
    finish(name, figures)
    if missed and not QUICK:
        sys.exit(f"{name}: {missed}")


def machine() -> str:
    """Return processor, cores and memory."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = model.group(1) if model else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {gib:.0f} GiB, {platform.system()}"


@dataclasses.dataclass(frozen=True)
class TrainRun:
    """The output and the metrics of a run of train.py: `lines[kind][step]`, the last line of each step."""

    output: str
    lines: dict[str, dict[int, dict]]
    seconds: float  # of the call
    minutes: float  # of the run, over all calls

    def figure(self, pattern: str) -> float:
        """Return the number that the pattern's group matches last in the output."""
        return float(re.findall(pattern, self.output)[-1].replace(",", ""))

    @property
    def exact(self) -> float:
        """The percentage of held-out puzzles that are solved at the end."""
        return self.figure(r"held-out exact: ([\d.]+)%")

    @property
    def parameters(self) -> float:
        """The number of parameters."""
        return self.figure(r"Parameters: ([\d,]+)")


def folder(name: str) -> pathlib.Path:
    """Return the folder in which a benchmark keeps runs for its next call."""
    return ROOT / "runs" / f"benchmark-{name}{'-quick' if QUICK else ''}"


def typed(keys: dict) -> list[str]:
    """Return keys of the configuration as words of a command."""
    return [f"--config.{key}={value}" for key, value in keys.items()]


def run(
    *words: str | pathlib.Path, cwd: pathlib.Path | str = ROOT, environment: dict | None = None, captured: bool = False
) -> tuple[float, str | None]:
    """Run a program of the workspace; return its seconds and what it printed, if captured. A failure is the end."""
    stdout, start = subprocess.PIPE if captured else None, time.perf_counter()
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=environment, stdout=stdout, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words[:3]))} ended with status {done.returncode}; the cause is above")
    return time.perf_counter() - start, done.stdout


@contextlib.contextmanager
def served(
    workdir: pathlib.Path, *words: str, environment: dict | None = None, fail: Callable[[str], object] = sys.exit
) -> Iterator[tuple[int, str]]:
    """Serve a run until the end of the block; yield (process number, address). It must end with status 0."""
    command = [sys.executable, "serve.py", f"--workdir={workdir}", "--port=0", *words]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        line = next((line for line in process.stdout if line.startswith("ready: ")), None)
        if line is None:
            fail(f"{' '.join(command)} ended with status {process.wait()}")
        yield process.pid, line.split()[1]
    finally:
        process.terminate()
        process.communicate(timeout=SERVER_ENDS_SECONDS)
    if process.returncode:
        fail(f"the server ended with status {process.returncode}")


def train(
    keys: dict, recipe: str = "configs/tiny.py", *words: str, workdir: pathlib.Path | str | None = None
) -> TrainRun:
    """Run train.py in a workdir, by default a temporary one, and show its output; a failure ends the benchmark.

    A run that the workdir has is continued, if it was trained with the same configuration.
    """
    if workdir is not None:
        check_unchanged(pathlib.Path(workdir), recipe, keys)
    with tempfile.TemporaryDirectory() if workdir is None else contextlib.nullcontext(workdir) as workdir:
        command = [sys.executable, "train.py", f"--config={recipe}", f"--workdir={workdir}", *words, *typed(keys)]
        start, output = time.perf_counter(), []
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            print(line, end="", flush=True)
            output.append(line)
        if process.wait():
            sys.exit(f"{' '.join(command)} ended with status {process.returncode}")
        lines = {}
        for line in lines_of(pathlib.Path(workdir)):
            lines.setdefault(line["kind"], {})[line["step"]] = line
        minutes = run_minutes(pathlib.Path(workdir))
    return TrainRun("".join(output), lines, time.perf_counter() - start, minutes)


def run_minutes(folder: pathlib.Path) -> float:
    """Return the minutes of a run by its last account, over all calls; without pauses, and without steps done again."""
    accounts = [line["seconds"] for line in lines_of(folder, "event") if line["event"] == "goodput"]
    return sum(seconds for part, seconds in accounts[-1].items() if part not in ("idle", "lost")) / 60


def check_unchanged(folder: pathlib.Path, recipe: str, keys: dict) -> None:
    """End with one line if the run of a folder was trained with other values than recipe and keys have now.

    Keys of the machine may differ, and the folder may hold no run.
    """
    from settings import loading, stored_config, together
    from settings.keys import flat

    if not stored_config.is_run(folder):
        return
    now = loading.load(recipe, "", {key: str(value) for key, value in keys.items()}).config
    if changed := stored_config.changes(stored_config.read_config(folder), together.without_unread(flat(now))):
        sys.exit(f"{folder} was trained with other values: {', '.join(changed)}; delete {folder} to train again")


def interval(successes: int, count: int) -> tuple[float, float]:
    """Return the lower and the upper end of the 95 % interval of a share (Wilson, 1927)."""
    from scipy.stats import binomtest

    return tuple(binomtest(successes, count).proportion_ci(method="wilson"))


def write_texts(folder: pathlib.Path, number: int = 20) -> str:
    """Write documents of sums into the folder `texts`; return their pattern."""
    (folder / "texts").mkdir()
    for index in range(number):
        words = " ".join(f"{factor * (index + 3)} is {factor} times {index + 3};" for factor in range(60))
        (folder / "texts" / f"{index}.txt").write_text(words)
    return f"{folder}/texts/*.txt"


def copy_tree(folder: pathlib.Path) -> None:
    """Copy the files that git would clone, with uncommitted changes; a clone in the folder gets these changes."""
    names = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, names.split("\0")):
        (folder / name).unlink(missing_ok=True)
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def steps_of(run: pathlib.Path) -> list[int]:
    """Return the steps in metrics.jsonl, in order."""
    return [line["step"] for line in lines_of(run, "train")]


def checkpoints(run: pathlib.Path) -> list[int]:
    """Return the steps of the checkpoints of a run, in order."""
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit())


def lines_of(run: pathlib.Path, *kinds: str) -> list[dict]:
    """Return the complete lines of metrics.jsonl of these kinds, by default of all; none before there is the file."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    whole = (json.loads(line) for line in lines if line.endswith("}"))
    return [line for line in whole if not kinds or line["kind"] in kinds]


PROGRAM = pathlib.Path(sys.argv[0])
if PROGRAM.resolve().parent == ROOT / "benchmarks" and PROGRAM.stem not in ("run_all", *PARSES_ITS_OWN):
    check_options(sys.argv[1:])
