# SPDX-License-Identifier: Apache-2.0
"""Does `train.py --tune` find three faults of a run, and how much of the healthy run's speed does it recover?

The faults: a batch takes READ_STEPS steps of the healthy run to read, and only one thread reads; all activations are
recomputed; and every step is logged. `--tune` gets the faulty options and prints the ones to add. Then the
healthy, the faulty and the tuned run are trained in turn, ROUNDS times.

- `healthy_ms`, `faulty_ms`, `tuned_ms`: of a step, medians over the rounds. The reader of the tuned run is as slow.
- `recovered`: healthy_ms / tuned_ms. `kept`: what `--tune` printed. `tune_seconds`: how long it took.
- `nothing_to_try`: whether `--tune` on the healthy options has no change to keep.
- `summary_seconds`: to read and summarise a trace of 10 steps of configs/tiny.py.

Gate: recovered is at least 0.9, nothing is changed on the healthy options, and a summary takes at most 60 s.
"""

import os
import re
import statistics
import tempfile
import time

import support

READ_STEPS, STEPS, ROUNDS = 1.4, (120 if support.QUICK else 400), (1 if support.QUICK else 3)
FAULTY = {
    "data.readers": "1", "data.prefetch": "1", "model.remat": "full", "train.log_every": "1",
}  # fmt: skip
RECIPE = "benchmarks/slow_recipe.py"


def tuned(keys: dict[str, str]) -> dict[str, str]:
    """Return the keys that --tune prints for a configuration; show its output."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--config={RECIPE}", f"--workdir={folder}/run", "--tune", *support.typed(keys)]
        _, said = support.run("train.py", *words, captured=True)
    print(said, flush=True)
    found = re.search(r"^add (.*): [\d.]+ times as fast$", said, re.MULTILINE)
    return dict(word.removeprefix("--config.").split("=") for word in found[1].split()) if found else {}


def step_ms(keys: dict[str, str]) -> float:
    """Return the mean milliseconds of a step of a run, without its first logged steps, which compile."""
    run = support.train(keys | {"train.steps": STEPS}, RECIPE)
    lines = [run.lines["train"][step] for step in sorted(run.lines["train"])]
    lines = [line for line in lines if line["step"] > 40]
    return 1000 * statistics.fmean(line["step_seconds"] for line in lines)


def summary_seconds() -> float:
    """Profile 10 steps of the tiny recipe; return the seconds that the run spent on the trace after them."""
    keys = {"train.steps": "16", "train.eval_every": "0", "evaluation.batches": "1", "evaluation.sample_tokens": "0"}
    run = support.train(keys, "configs/tiny.py", "--profile=6:15")
    return run.lines["event"][16]["seconds"]["profile"]


def main() -> None:
    """Tune, train, and judge."""
    read_seconds = READ_STEPS * step_ms({}) / 1000
    os.environ["SLOW_SECONDS"] = str(read_seconds)
    began = time.perf_counter()
    kept = tuned(FAULTY)
    seconds = time.perf_counter() - began
    found = {"healthy": [], "faulty": [], "tuned": []}
    for _ in range(ROUNDS):
        for name, keys, slow in (
            ("healthy", {}, 0.0), ("faulty", FAULTY, read_seconds), ("tuned", FAULTY | kept, read_seconds),
        ):  # fmt: skip
            os.environ["SLOW_SECONDS"] = str(slow)
            found[name].append(step_ms(keys))
    os.environ["SLOW_SECONDS"] = "0"
    nothing = not tuned({})
    figures = {f"{name}_ms": round(statistics.median(ms), 2) for name, ms in found.items()}
    figures |= {
        "recovered": round(figures["healthy_ms"] / figures["tuned_ms"], 3), "kept": " ".join(support.typed(kept)),
        "tune_seconds": round(seconds, 1), "nothing_to_try": nothing,
        "summary_seconds": round(summary_seconds(), 1),
    }  # fmt: skip
    holds = figures["recovered"] >= 0.9 and nothing and figures["summary_seconds"] <= 60
    support.judge("tuning", figures, "" if holds else "gate missed")


if __name__ == "__main__":
    main()
