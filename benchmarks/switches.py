# SPDX-License-Identifier: Apache-2.0
"""Does every setting of the five ENABLE_* switches train, with exactly the switches that were asked for?

Each of the 32 settings is deployed and launched on a local pod of two workers, with a decoder of one block. A setting
is right if its report names the switches that were on, and the cost of each; if the run's configuration has the keys of
these switches and no others; and if the run reached its last step. `--quick` takes the settings all off and all on.

What each setting showed stays in the folder runs/benchmark-switches, so that the same command continues after an
interruption; delete it to measure again. Leave the code alone meanwhile: each pod has a copy of it, and its hosts
refuse to train together if their copies differ.
"""

import itertools
import json
import os
import pathlib
import sys
import tempfile
import time

import support

from files.atomic import write_atomically
from pods.switches import CAUSAL, EVOLUTION, SWITCHES
from tests.pods.local_pods import LocalPod, alive, small_run, wait_until

STEPS, TRIALS, TRIAL_STEPS = 6, 2, 4
LIMIT_SECONDS = 3600  # of one run; the machine may be busy
FOLDER = support.ROOT / "runs" / "benchmark-switches"


def settings(quick: bool) -> list[tuple[str, ...]]:
    """Return the enabled switches of each setting."""
    chosen = itertools.product((False, True), repeat=len(SWITCHES))
    every = [tuple(itertools.compress(SWITCHES, values)) for values in chosen]
    return [every[0], every[-1]] if quick else every


def main() -> None:
    """Try the settings one after another, without those that were tried before."""
    found, every = [], settings(support.QUICK)
    for number, on in enumerate(every, start=1):
        found.append(tried(on))
        shown = f"{number}/{len(every)} {', '.join(on) or 'nothing'}: {found[-1]['faults'] or 'right'}"
        print(f"{shown}; {found[-1]['seconds']:.0f} s", flush=True)
    wrong = [each for each in found if each["faults"]]
    seconds = sum(each["seconds"] for each in found) / len(found)
    figures = {"settings": len(found), "wrong": len(wrong), "seconds_of_a_setting": round(seconds, 1)}
    support.finish("switches", figures)
    if wrong:
        sys.exit(f"wrong: {wrong}")


def tried(on: tuple[str, ...]) -> dict:
    """Return the switches, faults and seconds of a setting; it runs unless the folder has them."""
    result = FOLDER / f"{'-'.join(on) or 'nothing'}.json"
    if result.exists():
        return json.loads(result.read_text())
    FOLDER.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        faults = faults_of(pathlib.Path(name), FOLDER / "cache", on)
    found = {"on": on, "faults": faults, "seconds": time.perf_counter() - started}
    write_atomically(result, json.dumps(found).encode())
    return found


def faults_of(folder: pathlib.Path, cache: pathlib.Path, on: tuple[str, ...], *, deploys: bool = True) -> list[str]:
    """Return what is wrong with one setting; [] if it is as it should be.

    Args:
      folder: of the pod and its texts, empty.
      cache: of compiled programs.
      on: the enabled switches.
      deploys: whether to deploy them first, and to check the report.
    """
    variables = {name: str(name in on).lower() for name in SWITCHES} | {
        "EVOLUTION_TRIALS": str(TRIALS), "EVOLUTION_STEPS": str(TRIAL_STEPS), "XDG_CACHE_HOME": str(cache),
        "XLA_FLAGS": support.QUICK_COMPILATION,
    }  # fmt: skip
    pod = LocalPod(folder, ACCEL="v4-8", MODEL_SIZE="tiny")
    flags = small_run(folder, train__steps=STEPS, train__eval_every=3)
    call(pod, variables, "create", "--workers=2")
    for worker in (0, 1):  # evolution needs Optuna
        (pod.code_of(worker) / ".env").write_text(f"PYTHONPATH={os.getenv('PYTHONPATH', '')}")
    try:
        if deploys:
            call(pod, variables, "setup_optimizations", *flags)
        call(pod, variables, "launch_optimized", *flags)
        wait_until(lambda: not any(map(alive, pod.groups())), "the end of the run", LIMIT_SECONDS)
    finally:
        pod.end()
    found = wrong_run(pod.folder / "shared" / "tiny", on)
    if deploys:
        found += wrong_report(json.loads((pod.code_of(0) / "optimization_deployment_report.json").read_text()), on)
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
    lines = support.lines_of(run)
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


def call(pod: LocalPod, variables: dict[str, str], *words: str) -> None:
    """Run pod.py; a failure ends the benchmark with its output."""
    done = pod.run(*words, **variables)
    if done.status:
        sys.exit(f"pod.py {words[0]} ended with status {done.status}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
