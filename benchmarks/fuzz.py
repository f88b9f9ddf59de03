# SPDX-License-Identifier: Apache-2.0
"""Read ten thousand mutations of valid contents with every reader of foreign data, each reader in its own process.

Asserts that no reader raises anything but a one-line error of Torus, and that none takes over 10 s or 1 GiB for a case.
"""

import json
import subprocess
import sys

import support

from tests.fuzz.run import load_readers

CASES = 300 if support.QUICK else 10_000


def main() -> None:
    """Fuzz every reader and print the results."""
    figures, failed = {}, []
    for name in load_readers():
        command = [sys.executable, "tests/fuzz/run.py", str(CASES), "1", name]
        done = subprocess.run(command, cwd=support.ROOT, text=True, capture_output=True)
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"failures": [done.stderr[-500:]]}
        failed += [f"{name}: {failure}" for failure in found["failures"]]
        figures[name] = {
            "cases": found.get("cases"), "accepted": found.get("accepted"), "refused": found.get("refused"),
            "failures": len(found["failures"]), "slowest_seconds": round(found.get("slowest_seconds", 0.0), 2),
            "memory_gib": round(found.get("memory_gib", 0.0), 2),
        }  # fmt: skip
        print(f"{name}: {figures[name]}", flush=True)
    for failure in failed:
        print(failure, file=sys.stderr)
    support.finish("fuzz", figures)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
