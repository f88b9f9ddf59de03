# SPDX-License-Identifier: Apache-2.0
"""What is the goodput of a run that is killed every minute or two? The tiny recipe, for a quarter of an hour.

A kill -9 comes every 60 to 120 s at random, and the same command restarts the run at once. The goodput is the run's own
account. Also measures the time from the command to the end of the first new step: from nothing (no corpus, tokenizer or
compiled program), and for a restart.

Gate, except with --quick: the account's wall-clock time is that of this benchmark, and its parts add up to it, both
within 1 %. The account leaves out a second or two, in which the first process starts and the last one ends.
"""

import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import support

SECONDS, BETWEEN_KILLS = (120, (20, 40)) if support.QUICK else (900, (60, 120))  # from a start to its kill
POLL_SECONDS = 0.2
END_SECONDS = 120  # that the run may take to stop when asked
SAVED = 75  # its exit status then
LIMIT_ERROR = 0.01
RUN = [
    "--config=configs/tiny.py",
    "--config.train.steps=100000",
    "--config.train.log_every=1",
    "--config.train.save_every=4",
    "--config.train.eval_every=250",  # as in configs/base.py: tiny.py, whose run is short, evaluates every 50
    "--config.evaluation.sample_tokens=0",
]


def killed_again_and_again(folder: pathlib.Path) -> tuple[list[float], float]:
    """Train with kills and restarts for SECONDS, then stop; return the time.time() of each start, and of the end."""
    rng, started, end = random.Random(0), [], time.time() + SECONDS
    while time.time() < end:
        started.append(time.time())
        process = start(folder)
        if len(started) == 1:  # is let live until then, so that it is known how long that takes
            wait_for_step(folder, process, started[0])
        wait(process, min(rng.uniform(*BETWEEN_KILLS), max(0.0, end - time.time())))
        if time.time() < end:
            process.kill()
            process.wait()
            step = max(support.steps_of(folder / "run"), default=0)
            print(f"killed after {time.time() - started[-1]:.0f} s, at step {step}", flush=True)
    wait_for_step(folder, process, started[-1])
    process.send_signal(signal.SIGTERM)
    if (status := process.wait(END_SECONDS)) != SAVED:
        sys.exit(f"the run that was asked to stop ended with status {status}")
    return started, time.time()


def start(folder: pathlib.Path) -> subprocess.Popen:
    """Start or restart the run; its output goes to a file."""
    command = [sys.executable, "train.py", f"--workdir={folder / 'run'}", *RUN]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    with (folder / "printed.txt").open("a") as printed:
        return subprocess.Popen(command, cwd=support.ROOT, env=environment, stdout=printed, stderr=printed)


def wait(process: subprocess.Popen, seconds: float) -> None:
    """Let the run continue for some seconds; if it ends by itself, the benchmark ends."""
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return
    sys.exit(f"the run ended by itself, with status {status}")


def wait_for_step(folder: pathlib.Path, process: subprocess.Popen, since: float) -> None:
    """Return when a step has ended since some time.time()."""
    while not any(line["time"] > since for line in support.lines_of(folder / "run", "train")):
        wait(process, POLL_SECONDS)


def account(folder: pathlib.Path) -> dict:
    """Return the run's last account of its time."""
    return [line for line in support.lines_of(folder / "run", "event") if line["event"] == "goodput"][-1]


def start_seconds(folder: pathlib.Path, started: list[float]) -> list[float]:
    """Return the seconds of each start until its first step ended."""
    ends, found = [*started[1:], float("inf")], []
    for begin, end in zip(started, ends, strict=True):
        times = [line["time"] for line in support.lines_of(folder / "run", "train") if begin < line["time"] < end]
        found += [times[0] - begin] if times else []
    return found


def wrong_account(figures: dict) -> str:
    """Return what is wrong with the account of time; "" if nothing is."""
    if figures["wall_error"] > LIMIT_ERROR:
        return f"the account's wall-clock time is off by {figures['wall_error']:.1%}"
    if figures["parts_sum_error"] > LIMIT_ERROR:
        return f"its parts differ from it by {figures['parts_sum_error']:.1%}"
    return ""


def main() -> None:
    """Train with kills, report the goodput, and judge the account."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        started, ended = killed_again_and_again(folder)
        found, seconds, steps = account(folder), start_seconds(folder, started), max(support.steps_of(folder / "run"))
        step_seconds = statistics.median(line["step_seconds"] for line in support.lines_of(folder / "run", "train"))
    parts, wall, clock = found["seconds"], found["wall_seconds"], ended - started[0]
    figures = {
        "goodput": round(found["goodput"], 3), "restarts": len(started) - 1,
        "parts_sum_error": round(abs(sum(parts.values()) - wall) / wall, 5),
        "wall_error": round(abs(wall - clock) / clock, 5), "wall_seconds": round(wall, 1),
        **{f"{part}_seconds": round(value, 1) for part, value in parts.items()},
        "first_start_seconds": round(seconds[0], 1), "restart_seconds": round(statistics.median(seconds[1:]), 1),
        "steps": steps, "step_seconds": round(step_seconds, 2),
    }  # fmt: skip
    support.judge("goodput", figures, wrong_account(figures))


if __name__ == "__main__":
    main()
