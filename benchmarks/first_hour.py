# SPDX-License-Identifier: Apache-2.0
"""How long does each command of docs/first_hour.md take in a fresh copy of the workspace, with empty caches?"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import support

PAGE = support.ROOT / "docs" / "first_hour.md"
COMMAND = re.compile(r"^(?P<command>\S.*?) +# (?P<time>.+)$", re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """Return (command, time stated on the page) for each line of the page's script."""
    script = PAGE.read_text().split("```")[1]
    return [(match["command"], match["time"]) for match in COMMAND.finditer(script)]


def name_of(number: int, command: str) -> str:
    """Return the name of a command's seconds in RESULTS.md; a bar would end the cell of a table."""
    return f"{number}. {command.replace('|', '/')}"


def main() -> None:
    """Run the commands one after another; the first that fails ends the benchmark."""
    figures, total = {}, 0.0
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "torus"
        support.copy_tree(folder)
        environment = os.environ | {"XDG_CACHE_HOME": f"{scratch}/cache"}
        chosen = [commands()[0]] if support.QUICK else commands()
        for number, (command, _) in enumerate(chosen, start=1):
            print(f"$ {command}", flush=True)
            start = time.perf_counter()
            done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment)
            seconds = time.perf_counter() - start
            if done.returncode:
                sys.exit(f"error: `{command}` of docs/first_hour.md ended with status {done.returncode}")
            figures[name_of(number, command)] = round(seconds)
            total += seconds
    support.finish("first_hour", figures | {"minutes": round(total / 60, 1)})


if __name__ == "__main__":
    main()
