# SPDX-License-Identifier: Apache-2.0
"""Does every setting of the five ENABLE_* switches train, with exactly the switches that were asked for?

Each of the 32 settings is deployed and launched on a local pod of two workers, with a decoder of one block. A setting
is right if its report names the switches that were on, and the cost of each; if the run's configuration has the keys of
these switches and no others; and if the run reached its last step. `--quick` takes the settings all off and all on.
"""

import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import support

from pods.switches import CAUSAL, EVOLUTION, SWITCHES

STEPS, TRIALS, TRIAL_STEPS = 6, 2, 4
LIMIT_SECONDS = 900
SMALL = {
    "model.num_layers": 1, "model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 64,
    "model.vocab_size": 300, "model.max_length": 64, "train.sequence_length": 64, "train.global_batch": 16,
    "train.steps": STEPS, "train.log_every": 1, "train.eval_every": 3, "evaluation.sample_tokens": 0,
    "optimizer.warmup_steps": 2, "data.tokenizer": "byte", "data.holdout_fraction": 0.2, "logging.tensorboard": False,
}  # fmt: skip


def settings(quick: bool) -> list[tuple[str, ...]]:
    """Return the enabled switches of each setting."""
    chosen = itertools.product((False, True), repeat=len(SWITCHES))
    every = [tuple(itertools.compress(SWITCHES, values)) for values in chosen]
    return [every[0], every[-1]] if quick else every


def main() -> None:
    """Try the settings one after another."""
    wrong, seconds = {}, []
    every = settings(support.QUICK)
    with tempfile.TemporaryDirectory() as folder:
        text = write_text(pathlib.Path(folder))
        for number, on in enumerate(every):
            started = time.perf_counter()
            if faults := faults_of(pathlib.Path(folder) / str(number), pathlib.Path(folder) / "cache", text, on):
                wrong[", ".join(on) or "nothing"] = faults
            seconds.append(time.perf_counter() - started)
            left = sum(seconds) / len(seconds) * (len(every) - len(seconds))
            print(f"{number + 1}/{len(every)} {', '.join(on) or 'nothing'}: {faults or 'right'}; "
                  f"{seconds[-1]:.0f} s, {left / 60:.0f} min left", flush=True)  # fmt: skip
    figures = {"settings": len(every), "wrong": len(wrong), "seconds_of_a_setting": round(sum(seconds) / len(every), 1)}
    support.finish("switches", figures)
    if wrong:
        sys.exit(f"wrong: {wrong}")


def write_text(folder: pathlib.Path) -> str:
    """Write a small corpus below `folder`, and return its pattern."""
    for index in range(12):
        words = " ".join(f"{number * (index + 3)} is {number} times {index + 3};" for number in range(200))
        (folder / f"{index}.txt").write_text(words)
    return f"{folder}/*.txt"


def faults_of(
    folder: pathlib.Path, cache: pathlib.Path, text: str, on: tuple[str, ...], *, deploys: bool = True
) -> list[str]:
    """Return what is wrong with one setting on a pod in `folder`; [] if it is as it should be.

    Args:
      folder: of the pod.
      cache: of compiled programs.
      text: pattern of the corpus.
      on: the enabled switches.
      deploys: whether to deploy them first, and to check the report.
    """
    environment = os.environ | {name: str(name in on).lower() for name in SWITCHES}
    environment |= {
        "TRANSPORT": "local", "POD_ROOT": str(folder), "NAME": "bench", "ACCEL": "v4-8", "MODEL_SIZE": "tiny",
        "EVOLUTION_TRIALS": str(TRIALS), "EVOLUTION_STEPS": str(TRIAL_STEPS), "XDG_CACHE_HOME": str(cache),
    }  # fmt: skip
    keys = [f"--config.{key}={value}" for key, value in {**SMALL, "data.path": text}.items()]
    pod, run = folder / "bench", folder / "bench" / "shared" / "tiny"
    call(environment, "create", "--workers=2")
    for worker in pod.glob("worker-*/torus"):
        (worker / ".env").write_text(f"PYTHONPATH={os.getenv('PYTHONPATH', '')}")  # evolution needs Optuna
    try:
        if deploys:
            call(environment, "setup_optimizations", *keys)
        call(environment, "launch_optimized", *keys)
        wait_for_end(pod, run)
    finally:
        call(environment, "stop")
    found = wrong_run(run, on)
    if deploys:
        report = pod / "worker-0" / "torus" / "optimization_deployment_report.json"
        found += wrong_report(json.loads(report.read_text()), on)
    call(environment, "delete")
    return found


def wrong_report(report: dict, on: tuple[str, ...]) -> list[str]:
    """Return what the report says of the switches that is not so."""
    named = report["switches"]
    checks = {
        f"the report has {named['on']} on": sorted(named["on"]) == sorted(on),
        f"the report has costs of {sorted(named['cost'])}": sorted(named["cost"]) == sorted(on),
        f"the report leaves out {named['left_out']}": not named["left_out"],
    }
    return [line for line, right in checks.items() if not right]


def wrong_run(run: pathlib.Path, on: tuple[str, ...]) -> list[str]:
    """Return what is wrong with the run's configuration, steps and evaluations."""
    config = json.loads((run / "config.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    found = [] if steps[-1:] == [STEPS] else [f"its steps are {steps}"]
    for name, keys in SWITCHES.items():
        has = [config[key] == value for key, value in keys.items()]
        if keys and all(has) != (name in on):
            found.append(f"{name}: the run has { ({key: config[key] for key in keys}) }")
    explained = any(line["kind"] == "causality" for line in lines)
    if explained != (CAUSAL in on):
        found.append(f"{CAUSAL}: {'an' if explained else 'no'} analysis at the evaluations")
    searched = (run.parent / "tiny-search" / "evolution" / "best.json").exists()
    if searched != (EVOLUTION in on):
        found.append(f"{EVOLUTION}: {'a' if searched else 'no'} search")
    return found


def call(environment: dict, *words: str) -> None:
    """Run pod.py; a failure ends the benchmark with its output."""
    done = subprocess.run([sys.executable, "pod.py", *words], cwd=support.ROOT, env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    if done.returncode:
        sys.exit(f"pod.py {words[0]} ended with status {done.returncode}:\n{done.stdout}")


def wait_for_end(pod: pathlib.Path, run: pathlib.Path) -> None:
    """Return when the programs of all workers have ended."""
    end = time.monotonic() + LIMIT_SECONDS
    groups = [file.read_text().strip() for file in pod.glob("worker-*/torus/run.pid")]
    while any(pathlib.Path(f"/proc/{group}").exists() for group in groups):
        if time.monotonic() > end:
            sys.exit(f"{run} did not end within {LIMIT_SECONDS} s")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
