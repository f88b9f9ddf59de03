# SPDX-License-Identifier: Apache-2.0
"""Does a run survive strangers at its hub? Four processes train while ten thousand connections send anything.

Half of the connections come before all processes have joined, the others during training. Asserts that the run saves
and stops on request, that its losses equal those of an undisturbed run bit for bit, and that foreign connections were
closed and counted.
"""

import os
import pathlib
import re
import signal
import sys
import tempfile
import time

import support

import faults

os.environ.setdefault("XLA_FLAGS", support.QUICK_COMPILATION)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

from tests import groups
from tests.hostile import Siege

STRANGERS = 400 if support.QUICK else 10_000
PROCESSES, FEWEST_STEPS, SAVED = 4, 20, 75
COUNTED = 0.99  # of the strangers, at least: one that hangs up at once may not be seen
ENDLESS = {"train__steps": 100_000, "train__save_every": 100, "train__hang_seconds": 0}


def main() -> None:
    """Train with and without attacks, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        support.write_texts(place)
        try:
            calm = trained(place, "calm", strangers=0)
            besieged = trained(place, "besieged", STRANGERS)
        finally:
            groups.end_all()
        histories = [faults.history(place / name) for name in ("calm", "besieged")]
    common = histories[0].keys() & histories[1].keys()
    figures = {
        "connections": STRANGERS,
        "closed_and_counted": besieged["counted"],
        "connections_per_second": round(STRANGERS / besieged["siege_seconds"]),
        "status": besieged["statuses"],
        "losses_compared": len(common),
        "losses_differ": sum(histories[0][key] != histories[1][key] for key in common),
        "steps_per_second_calm": round(calm["steps_per_second"], 2),
        "steps_per_second_besieged": round(besieged["steps_per_second"], 2),
        "memory_of_process_0_mib": [round(each["memory_mib"]) for each in (calm, besieged)],
    }
    support.finish("hostile", figures)
    assert calm["statuses"] == besieged["statuses"] == [SAVED] * PROCESSES, figures
    assert len(common) >= FEWEST_STEPS and figures["losses_differ"] == 0, figures
    assert COUNTED * STRANGERS <= besieged["counted"] <= STRANGERS and calm["counted"] == 0, figures


def trained(place: pathlib.Path, workdir: str, strangers: int) -> dict:
    """Train until all strangers are done and some steps are taken; return the results."""
    port = groups.free_ports()
    sieges = [Siege(port + 1, strangers // 2, seed=0)] if strangers else []
    processes = faults.started(place, workdir, count=PROCESSES, port=port, absent=(PROCESSES - 1,), **ENDLESS)
    wait_for(sieges)
    processes += faults.started(place, workdir, count=PROCESSES, port=port, absent=range(PROCESSES - 1), **ENDLESS)
    wait_for_steps(processes[0], 1)
    training = time.monotonic()
    sieges += [Siege(port + 1, strangers - strangers // 2, seed=1)] if strangers else []
    wait_for(sieges)
    wait_for_steps(processes[0], 2 * FEWEST_STEPS)
    ended, steps = time.monotonic(), processes[0].steps
    memory = int(re.search(r"VmHWM:\s+(\d+)", pathlib.Path(f"/proc/{processes[0].process.pid}/status").read_text())[1])
    processes[0].process.send_signal(signal.SIGTERM)
    faults.until_ended(processes)
    log = (place / workdir / "logs" / "train_worker_0.out").read_text()
    counted = re.search(r"closed ([\d,]+) connections? that did not know", log)
    return {
        "statuses": [process.status for process in processes],
        "counted": int(counted[1].replace(",", "")) if counted else 0,
        "siege_seconds": sum(siege.seconds for siege in sieges),
        "steps_per_second": steps / (ended - training),
        "memory_mib": memory / 1024,
    }


def wait_for(sieges: list[Siege]) -> None:
    """Return when all strangers are done."""
    for siege in sieges:
        siege.join(faults.ENDS_SECONDS)
        assert siege.made == siege.number, f"{siege.made} of {siege.number} attacks were made"


def wait_for_steps(process: faults.Watched, steps: int) -> None:
    """Return when a process has taken some steps; if it has ended, the benchmark ends."""
    while process.steps < steps:
        if process.is_over:
            sys.exit(f"process 0 has ended: {process.last_line}")
        time.sleep(faults.POLL_SECONDS)


if __name__ == "__main__":
    main()
