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

BLOWS = 2 if support.QUICK else 8
SEED, HOSTS, STEPS = 0, 4, 120
TYPED = tiny_studies.flags(steps=STEPS, eval_every=40, save_every=20)
STUDY = ["exp08-ema", "--base=mini", "--root=study", "--skip_small", *TYPED]


class Pod:
    """A pod of 4 hosts on this machine; pod.py sees it by `environment`."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder / "bench"
        self.environment = os.environ | {
            "TRANSPORT": "local", "POD_ROOT": str(folder), "NAME": "bench", "ACCEL": "v4-32",
            "XDG_CACHE_HOME": str(folder / "cache"),
        }  # fmt: skip
        self.call("create").wait()
        packages = f"PYTHONPATH={os.getenv('PYTHONPATH', '')}"  # of which process 0 alone needs Optuna
        (self.folder / "worker-0" / "torus" / ".env").write_text(packages)

    def call(self, *words: str) -> subprocess.Popen:
        """Start a call of pod.py."""
        return subprocess.Popen([sys.executable, "pod.py", *words], cwd=support.ROOT, env=self.environment)

    def sweep_of(self, host: int) -> int:
        """Return the process of sweep.py on a host: the one that the group's shell has started."""
        group = (self.folder / f"worker-{host}" / "torus" / "run.pid").read_text().strip()
        return int(pathlib.Path(f"/proc/{group}/task/{group}/children").read_text().split()[0])


def run(folder: pathlib.Path, longest: float) -> tuple[float, int]:
    """Run the study; with `longest` > 0, strike a host at most that many seconds after each start.

    Returns the seconds that it took, and the number of blows.
    """
    pod, rng, struck, began = Pod(folder), random.Random(SEED), 0, time.perf_counter()
    if pod.call("launch", "--", "python", "sweep.py", "run", *STUDY).wait():
        sys.exit("the study was not launched")
    supervising = pod.call("supervise", "--max_restarts=100")
    while longest and struck < BLOWS and supervising.poll() is None:
        time.sleep(rng.uniform(3.0, longest))
        try:
            os.kill(pod.sweep_of(rng.randrange(HOSTS)), rng.choice([signal.SIGKILL, signal.SIGTERM]))
            struck += 1
        except (OSError, IndexError):
            pass  # it is being started
    if status := supervising.wait():
        sys.exit(f"the study ended with status {status}")
    return time.perf_counter() - began, struck


def results(folder: pathlib.Path) -> dict[str, object]:
    """Return the results of the study of a pod by trial."""
    return tiny_studies.results(sorted(folder.glob("bench/shared/study/*/*")), STEPS)


def main() -> None:
    """Measure everything."""
    with tempfile.TemporaryDirectory() as name:
        calm, hit = pathlib.Path(name) / "calm", pathlib.Path(name) / "hit"
        seconds, _ = run(calm, 0.0)
        _, struck = run(hit, 0.25 * seconds)
        expected, found = results(calm), results(hit)
        import optuna

        database = f"sqlite:///{hit}/bench/worker-0/torus/studies.db"
        trials = optuna.load_study(study_name="trm-mini", storage=database).trials
    figures = {
        "hosts": HOSTS, "blows": struck, "trials": len(trials),
        "trials_ended_once": sum(trial.state.name == "COMPLETE" for trial in trials),
        "trials_equal_bit_for_bit": sum(found.get(trial) == expected[trial] for trial in expected),
        "calm_seconds": round(seconds, 1),
    }  # fmt: skip
    support.finish("studies_pod", figures)
    if not struck:
        sys.exit("studies_pod: no process was killed, so nothing is shown")
    if {figures["trials_ended_once"], figures["trials_equal_bit_for_bit"]} != {figures["trials"]}:
        sys.exit("studies_pod: a trial did not end once, or differs from that of the undisturbed study")


if __name__ == "__main__":
    main()
