# SPDX-License-Identifier: Apache-2.0
"""A program with the contract of train.py that needs no jax: exit statuses, checkpoints, metrics, the folder's lock.

Its arguments are those of a trial. A file `plan` in the folder above the study's folders has one line for each attempt,
the exit status. After the last line an attempt finishes. A step takes 10 ms.
"""

import fcntl
import json
import pathlib
import signal
import sys
import time

given = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
STEPS = int(given.get("config.train.steps", 20))
workdir = pathlib.Path(given["workdir"])
workdir.mkdir(parents=True, exist_ok=True)
with (workdir / "starts").open("a") as file:
    print(time.time(), file=file)
lock = (workdir / "lock").open("a")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
plan = workdir.parents[1] / "plan"
statuses = plan.read_text().split() if plan.exists() else []
attempt = len((workdir / "starts").read_text().splitlines())
checkpoints = workdir / "checkpoints"
done = max((int(path.name) for path in checkpoints.glob("*")), default=0)
for step in range(done + 1, STEPS + 1):
    time.sleep(0.03)
    with (workdir / "metrics.jsonl").open("a") as file:
        exact = step / STEPS * float(given.get("config.optimizer.ema_decay", 1.0))
        loss = abs(float(given.get("config.optimizer.learning_rate", 1.0)) - 0.01) + 1 / step
        line = {"kind": "eval", "step": step, "eval_exact_accuracy": exact, "eval_loss": loss}
        print(json.dumps(line), file=file)
    (checkpoints / str(step)).mkdir(parents=True)
    if asked:
        sys.exit(75)
    if attempt <= len(statuses) and step == max(done + 1, STEPS // 2):
        print("error: as planned", file=sys.stderr)
        sys.exit(int(statuses[attempt - 1]))
