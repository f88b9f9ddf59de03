# SPDX-License-Identifier: Apache-2.0
"""How long does the report of a run of 100,000 logged steps take, and how large is it?

Writes the folder of a run that was restarted, skipped updates, rolled back, saved, evaluated and scored tasks, and
calls report.py on it. It has one thread, so on a free machine `seconds` are about `processor_seconds`. Status 1: these
are MOST_SECONDS or more, or the page has MOST_MIB or more.
"""

import json
import math
import pathlib
import random
import resource
import sys
import tempfile

import support

from configs import base
from settings.keys import flat

MOST_SECONDS, MOST_MIB, MIB = 10.0, 5.0, 2**20
STEPS = 10_000 if support.QUICK else 100_000
BEGAN, STEP_SECONDS = 1_780_000_000.0, 0.75
EVALUATED, SAVED, SCORED = 500, 1_000, 5_000  # steps between these
RESTARTS = {0.31: 2_400.0, 0.72: 30_000.0}  # share of the steps after which the run stops: seconds until it continues
ROLLED_BACK = 0.55  # share of the steps at which updates are skipped until the run rolls back
LOST = 400  # steps that are repeated after a restart or a roll back
PARTS = {"training": 0.9, "compile": 0.015, "data": 0.01, "evaluation": 0.03, "checkpoint": 0.01, "idle": 0.035}


def write_run(folder: pathlib.Path, steps: int, seed: int = 0) -> None:
    """Write a folder like that of a run with this many steps."""
    config = flat(base.get_config()) | {"train.steps": steps, "train.seed": seed}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    recipe = {key: value for key, value in config.items() if key != "train.steps"}
    origin = {"recipe": "configs/tiny.py", "recipe_config": recipe, "command": ["train.py", f"--workdir={folder.name}"]}
    (folder / "run.json").write_text(json.dumps(origin))
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines(steps, random.Random(seed)))
    (folder / "summary.txt").write_text("held-out bits per byte: 1.234\nsample (temperature 0.8):\n  | to be or not")


def lines(steps: int, rng: random.Random):
    """Yield the lines of metrics.jsonl."""
    now, step, pending = BEGAN, 0, {int(share * steps): idle for share, idle in RESTARTS.items()}
    bad = int(ROLLED_BACK * steps)
    yield event("start", now, 0)
    while step < steps:
        step, now = step + 1, now + STEP_SECONDS
        if bad <= step < bad + 8:
            yield event("update_not_taken", now, step, loss=97.0, gradient_norm=1e4, in_a_row=step - bad + 1)
        yield train_line(step, steps, now, rng, spikes=bad <= step < bad + 8)
        if step == bad + 8:
            step, bad = step - LOST, steps + 1
            yield event("roll_back", now, step, first_step=step, last_step=step + LOST)
        if step % EVALUATED == 0:
            yield {"kind": "eval", "step": step, "eval_loss": loss_at(step, steps) + 0.05, "time": now}
        if step % SAVED == 0:
            yield event("saved", now, step, write_seconds=3.0)
        if step % SCORED == 0:
            yield {"kind": "tasks", "step": step, "qa/accuracy": step / steps, "qa/accuracy_stderr": 0.01, "time": now}
        if step in pending:
            now += pending.pop(step)
            step -= LOST
            yield event("start", now, step)
    yield event("goodput", now, steps, seconds={part: share * (now - BEGAN) for part, share in PARTS.items()})


def event(name: str, now: float, step: int, **figures) -> dict:
    """Return the line of an event."""
    return {"kind": "event", "event": name, "step": step, **figures, "time": now}


def loss_at(step: int, steps: int) -> float:
    """Return a loss that falls as losses do."""
    return 2.2 + 8.6 / (1 + 40 * step / steps)


def train_line(step: int, steps: int, now: float, rng: random.Random, *, spikes: bool) -> dict:
    """Return the line of a step, with as many figures as a run writes."""
    loss = loss_at(step, steps) + rng.gauss(0, 0.05) + (40 if spikes else 0)
    rate = 1_400_000 * (0.4 if rng.random() < 0.002 else 1) * (1 + rng.gauss(0, 0.01))
    return {
        "kind": "train", "step": step, "loss": loss, "gradient_norm": 0.3 + abs(rng.gauss(0, 0.1)) + 20 * spikes,
        "learning_rate": 3e-4 * min(1, 50 * step / steps) * (0.55 + 0.45 * math.cos(math.pi * step / steps)),
        "skipped": float(spikes), "global_batch": 256, "tokens": 1_048_576, "total_tokens": step * 1_048_576,
        "step_seconds": STEP_SECONDS, "tokens_per_second": rate, "tokens_per_second_per_device": rate / 32,
        "examples_per_second": rate / 4096, "mfu": 0.41 * rate / 1_400_000, "data_wait_seconds": 0.002,
        "host_memory_gib": 15.4 + step / steps, "device_memory_gib": 21.7, "device_memory_peak_gib_min": 26.5,
        "device_memory_peak_gib_max": 27.9, "goodput": 0.9, "time": now,
    }  # fmt: skip


def main() -> None:
    """Report on one run, and print seconds and size."""
    with tempfile.TemporaryDirectory() as name:
        run, page = pathlib.Path(name) / "long", pathlib.Path(name) / "report.html"
        write_run(run, STEPS)
        seconds, _ = support.run("report.py", run, f"--html={page}")
        size = page.stat().st_size / MIB
        read = (run / "metrics.jsonl").stat().st_size / MIB
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = used.ru_utime + used.ru_stime
    figures = {"steps": STEPS, "seconds": round(seconds, 1), "processor_seconds": round(busy, 1)}
    support.finish("run_report", figures | {"page_mib": round(size, 2), "metrics_mib": round(read, 1)})
    sys.exit(busy >= MOST_SECONDS or size >= MOST_MIB)


if __name__ == "__main__":
    main()
