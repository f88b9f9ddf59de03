# SPDX-License-Identifier: Apache-2.0
"""Does a study on a pod survive the loss of hosts? Two tiny trials on a local pod of 4 processes, under supervision.

At random moments the sweep.py of a random host gets kill -9 or SIGTERM, and `pod.py supervise` starts the study again.
Every trial must end exactly once, and its losses and arrays must equal those of an undisturbed study bit for bit;
otherwise the exit status is 1.
"""

import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import support
import tiny_studies
from tests.pods.local_pods import LocalPod

BLOWS = 2 if support.QUICK else 8
SEED, HOSTS, STEPS = 0, 4, 120
TYPED = tiny_studies.flags(steps=STEPS, eval_every=40, save_every=20)
STUDY = ["exp08-ema", "--base=mini", "--root=study", "--skip_small", *TYPED]


def call(pod: LocalPod, *words: str) -> subprocess.Popen:
    """Start a call of pod.py."""
    return subprocess.Popen([sys.executable, "pod.py", *words], cwd=support.ROOT, env=pod.environment)


def sweep_of(pod: LocalPod, host: int) -> int:
    """Return the process of sweep.py on a host: the one that the group's shell has started."""
    group = (pod.code_of(host) / "run.pid").read_text().strip()
    return int(pathlib.Path(f"/proc/{group}/task/{group}/children").read_text().split()[0])


def run(folder: pathlib.Path, longest: float) -> tuple[float, int]:
    """Run the study; with `longest` > 0, strike a host at most that many seconds after each start.

    Returns the seconds that it took, and the number of blows.
    """
    pod, rng, struck = LocalPod(folder, ACCEL="v4-32"), random.Random(SEED), 0
    call(pod, "create").wait()
    packages = f"PYTHONPATH={os.getenv('PYTHONPATH', '')}"  # process 0 alone needs Optuna of these
    (pod.code_of(0) / ".env").write_text(packages)
    began = time.perf_counter()
    if call(pod, "launch", "--", "python", "sweep.py", "run", *STUDY).wait():
        sys.exit("the study was not launched")
    supervising = call(pod, "supervise", "--max_restarts=100")
    while longest and struck < BLOWS and supervising.poll() is None:
        time.sleep(rng.uniform(3.0, longest))
        try:
            os.kill(sweep_of(pod, rng.randrange(HOSTS)), rng.choice([signal.SIGKILL, signal.SIGTERM]))
            struck += 1
        except (OSError, IndexError):
            pass  # it is being started
    if status := supervising.wait():
        sys.exit(f"the study ended with status {status}")
    return time.perf_counter() - began, struck


def main() -> None:
    """Measure everything."""
    with tempfile.TemporaryDirectory() as name:
        calm, hit = pathlib.Path(name) / "calm", pathlib.Path(name) / "hit"
        seconds, _ = run(calm, 0.0)
        _, struck = run(hit, 0.25 * seconds)
        trials = (folder.glob("pods/mine/shared/study/*/*") for folder in (calm, hit))
        found = tiny_studies.compared(*trials, hit / "pods/mine/worker-0/torus/studies.db", STEPS)
    figures = {"hosts": HOSTS, "blows": struck, **found, "calm_seconds": round(seconds, 1)}
    support.finish("studies_pod", figures)
    if not struck:
        sys.exit("studies_pod: no process was killed, so nothing is shown")
    if {figures["trials_ended_once"], figures["trials_equal_bit_for_bit"]} != {figures["trials"]}:
        sys.exit("studies_pod: a trial did not end once, or differs from that of the undisturbed study")


if __name__ == "__main__":
    main()
