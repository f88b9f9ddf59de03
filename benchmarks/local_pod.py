# SPDX-License-Identifier: Apache-2.0
"""How long until a pod of processes on this machine trains, and does a stop and restart lose a step?

The tiny recipe on 4 workers (a v4-32) and on 8 (a v4-64), from an empty cache: launch, first step, stop, restart.
"""

import contextlib
import pathlib
import subprocess
import sys
import tempfile
import time

import support

from tests.pods.local_pods import LocalPod

LIMIT_SECONDS = 600
RUN = [
    "--config=configs/tiny.py",
    "--config.train.steps=10000",
    "--config.train.log_every=1",
    "--config.evaluation.sample_tokens=0",
]


def main() -> None:
    """Create, use and delete both pods."""
    figures = {}
    for name, workers in (("v4-32", 4), ("v4-64", 8)):
        with tempfile.TemporaryDirectory() as folder:
            figures |= {f"{name}_{key}": value for key, value in life(pathlib.Path(folder), name, workers).items()}
    support.finish("local_pod", figures)
    if not all(value for key, value in figures.items() if key.endswith("_all_well")):
        sys.exit("a pod lost a worker or a step, or left processes behind")


def life(folder: pathlib.Path, name: str, workers: int) -> dict:
    """Return the figures of one pod."""
    pod = LocalPod(folder, ACCEL=name)
    call(pod, "create")
    with contextlib.ExitStack() as ends:  # also where a step never comes
        ends.callback(call, pod, "delete")
        ends.callback(call, pod, "stop")
        return measured(pod, workers)


def measured(pod: LocalPod, workers: int) -> dict:
    """Return the figures of a pod that is created: launch, stop, restart."""
    run = pod.folder / "shared" / "tiny"
    started = time.perf_counter()
    call(pod, "launch", *RUN)
    groups = pod.groups()
    wait_for_step(run, 1)
    first_step = time.perf_counter() - started
    wait_for_step(run, 5)
    started = time.perf_counter()
    call(pod, "stop")
    stop = time.perf_counter() - started
    left, before = processes_of(groups), support.steps_of(run)
    last = before[-1]
    saved = support.checkpoints(run)[-1]
    started = time.perf_counter()
    call(pod, "restart")
    wait_for_step(run, last + 1)
    restart = time.perf_counter() - started
    went_on_at = support.steps_of(run)[len(before)]
    return {
        "workers": len(groups),
        "launch_to_first_step_seconds": round(first_step, 1),
        "stop_seconds": round(stop, 1),
        "processes_left": left,
        "last_logged_step": last,
        "checkpoint_step": saved,
        "restart_went_on_at_step": went_on_at,
        "restart_to_first_step_seconds": round(restart, 1),
        "all_well": len(groups) == workers and left == 0 and saved == last and went_on_at == last + 1,
    }


def call(pod: LocalPod, *words: str) -> None:
    """Run pod.py; a failure ends the benchmark."""
    print("pod.py", *words, flush=True)
    support.run("pod.py", *words, environment=pod.environment)


def wait_for_step(run: pathlib.Path, step: int) -> None:
    """Return when a step is in metrics.jsonl."""
    end = time.monotonic() + LIMIT_SECONDS
    while step not in support.steps_of(run):
        if time.monotonic() > end:
            sys.exit(f"step {step} was not reached within {LIMIT_SECONDS} s")
        time.sleep(0.1)


def processes_of(groups: list[int]) -> int:
    """Return the number of processes of these groups, without zombies."""
    listing = subprocess.run(["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True).stdout
    rows = [line.split() for line in listing.splitlines()]
    return sum(int(group) in groups and state[0] != "Z" for group, state in rows)


if __name__ == "__main__":
    main()
