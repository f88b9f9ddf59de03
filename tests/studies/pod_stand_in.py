# SPDX-License-Identifier: Apache-2.0
"""A program with the contract of train.py on several hosts that needs no jax: the processes have a real hub.

In a step, which takes 30 ms, all processes exchange a number and add the values. Every fourth step is saved. If a
process dies, the others end. SIGTERM to any of them makes all save at the same step. The process whose number is in the
variable FAILS ends at step 3 with status 2, as after a mistake in its configuration. While the root of the study has a
file `hold`, step 6 waits for a stop.
"""

import json
import os
import pathlib
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cluster import processes
from cluster.group import find_group

EVERY = 4
given = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
STEPS, workdir = int(given["config.train.steps"]), pathlib.Path(given["workdir"])
group = find_group(os.environ, "cpu", 30)
processes.join(group, group.hub_port, 30, lambda line, status: (print(line, file=sys.stderr), os._exit(status)))
signal.signal(signal.SIGTERM, lambda *_: processes.ask_to_stop())
checkpoints = workdir / "checkpoints"
done = max((int(path.name) for path in checkpoints.glob("*")), default=0)
total = json.loads((checkpoints / str(done) / "total").read_text()) if done else 0.0
with (workdir / f"starts{group.index}").open("a") as file:
    print(done, file=file)
for step in range(done + 1, STEPS + 1):
    time.sleep(0.03)
    while step == 6 and (workdir.parents[1] / "hold").exists() and not processes.stop_agreed():
        time.sleep(0.02)
    total += max(processes.gather("step", step / 7))
    stops = processes.boundary()
    if step == 3 and os.getenv("FAILS") == str(group.index):
        processes.fail("error: as planned", 2)
        os._exit(2)
    if group.index == 0:
        with (workdir / "metrics.jsonl").open("a") as file:
            line = {"kind": "eval", "step": step, "eval_exact_accuracy": total, "eval_loss": total}
            print(json.dumps(line), file=file)
        if step % EVERY == 0 or step == STEPS or stops:
            (checkpoints / str(step)).mkdir(parents=True)
            (checkpoints / str(step) / "total").write_text(json.dumps(total))
    if stops:
        processes.leave()
        sys.exit(75)
processes.leave()
