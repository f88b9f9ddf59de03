# SPDX-License-Identifier: Apache-2.0
"""Does a run of 100,000 short steps stay as it began? Memory, speed, logs, and the seconds to read them.

Trains a tiny language model by train.py with everything that a run writes, and an evaluation and a save every 1,000
steps. The same readers then read a copy with a line for each step, as train.log_every=1 would have written it.
"""

import json
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

import support

from soak import KEYS, LIMIT_MB, TEXT_KEYS, TEXTS, Watched

STEPS, EVERY = (2000, 200) if support.QUICK else (100_000, 1000)
TENTHS = 10
LIMIT_STEP_MS = 5.0  # so that what a step costs besides its arithmetic is seen
LIMIT_DRIFT = 0.03
LIMIT_READ_SECONDS = 30.0  # half of what a run grants its report; start and plots take some 2 s, 100,000 lines 2 more
MIB = 1 << 20


def long_run(folder: pathlib.Path, steps: int, every: int) -> dict:
    """Train for some steps in a folder; return the figures of the run and of its readers."""
    keys = KEYS | TEXT_KEYS | {"data.path": support.write_texts(folder, TEXTS)}
    often = {"train.eval_every": every, "train.save_every": every, "logging.tensorboard": True, "logging.report": True}
    watched = Watched(folder, [], keys | often | {"train.steps": steps})
    watched.follow()
    run, full = folder / "run", folder / "full"
    figures = steadiness(run, steps) | {"processor_drift": round(processor_drift(watched.samples, steps), 4)}
    figures |= {f"{name}_mib": round(size / MIB, 2) for name, size in sizes(run).items()}
    shutil.copytree(run, full, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    fill(full / "metrics.jsonl")
    figures["full_metrics_mib"] = round((full / "metrics.jsonl").stat().st_size / MIB, 2)
    for name, read in {"": run, "full_": full}.items():
        figures |= {f"{name}{reader}_seconds": round(seconds, 2) for reader, seconds in readers(read).items()}
    return figures


def steadiness(run: pathlib.Path, steps: int) -> dict:
    """Return memory and time of a step in the first and the last tenth of a run, from its metrics.

    The growth of memory is that from the second tenth, since the first has the first evaluation and save.
    """
    tenths = [[] for _ in range(TENTHS)]
    for line in support.lines_of(run, "train"):
        tenths[(line["step"] - 1) * TENTHS // steps].append(line)
    memory = [statistics.median(1024 * line["host_memory_gib"] for line in tenth) for tenth in tenths]
    seconds = [[line["step_seconds"] for line in tenth] for tenth in tenths]
    return {
        "steps": steps,
        "memory_mib_first_tenth": round(memory[0], 1), "memory_mib_last_tenth": round(memory[-1], 1),
        "grown_mib": round(memory[-1] - memory[1], 1),
        "step_ms_first_tenth": round(1000 * statistics.median(seconds[0]), 3),
        "step_ms_last_tenth": round(1000 * statistics.median(seconds[-1]), 3),
        "drift": round(statistics.median(seconds[-1]) / statistics.median(seconds[0]) - 1, 4),
    }  # fmt: skip


def processor_drift(samples: list[tuple], steps: int) -> float:
    """Return by which part a step takes more time of processors in the last tenth of a run than in the second.

    Other work on the machine hardly changes it. The first tenth has the first evaluation and save.
    """
    tenth, spent = steps // TENTHS, []
    for start in (tenth, steps - tenth):
        inside = [(sample[0], sample[-1]) for sample in samples if start <= sample[0] < start + tenth]
        (first, before), (last, after) = inside[0], inside[-1]
        spent.append((after - before) / (last - first))
    return spent[1] / spent[0] - 1


def sizes(run: pathlib.Path) -> dict[str, int]:
    """Return the bytes of the files that grow with a run."""
    names = {"metrics": "metrics.jsonl", "ledger": "ledger.jsonl", "logs": "logs/*", "tensorboard": "tensorboard/*"}
    return {name: sum(path.stat().st_size for path in run.glob(pattern)) for name, pattern in names.items()}


def fill(metrics: pathlib.Path) -> None:
    """Repeat each line of a logged step for the steps before it that were not logged."""
    last, text = 0, []
    for line in map(json.loads, metrics.read_text().splitlines()):
        if line["kind"] == "train":
            text += [json.dumps(line | {"step": step}) for step in range(last + 1, line["step"])]
            last = line["step"]
        text.append(json.dumps(line))
    metrics.write_text("\n".join(text) + "\n")


def readers(run: pathlib.Path) -> dict[str, float]:
    """Return the seconds of what reads a run: its page, the list of runs, a study's row, and the figures of a pod."""
    from pods.watch import summarise
    from reporting.metrics import read_lines
    from studies import outcome

    def of_pod() -> None:
        summarise(read_lines(run / "metrics.jsonl"), None, None, None)

    programs = {"report": ["report.py", run, f"--html={run / 'page.html'}"], "list": ["scripts/list_runs.py", run]}
    found = {name: support.run(*words, captured=True)[0] for name, words in programs.items()}
    calls = {"study": lambda: outcome.read(str(run), ""), "pod": of_pod}
    for name, call in calls.items():
        began = time.perf_counter()
        call()
        found[name] = time.perf_counter() - began
    return found


def failures(figures: dict) -> list[str]:
    """Return what is wrong with the figures."""
    slow = [name for name, value in figures.items() if name.endswith("_seconds") and value > LIMIT_READ_SECONDS]
    slower = figures["processor_drift"]  # other work on the machine, more or less of it, changes the other drift
    found = {
        f"memory has grown by more than {LIMIT_MB} MiB": figures["grown_mib"] > LIMIT_MB,
        f"a step takes over {LIMIT_STEP_MS} ms, so the run says little": figures["step_ms_first_tenth"] > LIMIT_STEP_MS,
        f"steps got slower by more than {LIMIT_DRIFT:.0%}": slower > LIMIT_DRIFT and not support.QUICK,
        f"reading takes over {LIMIT_READ_SECONDS:g} s: {', '.join(slow)}": bool(slow),
    }
    return [line for line, is_so in found.items() if is_so]


def main() -> None:
    """Train, read, and judge; a short run is too short to judge its speed."""
    with tempfile.TemporaryDirectory() as folder:
        figures = long_run(pathlib.Path(folder), STEPS, EVERY)
    support.finish("long_run", figures)
    if wrong := failures(figures):
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()
