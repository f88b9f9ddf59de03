# SPDX-License-Identifier: Apache-2.0
"""Search for a configuration, then train the best one: what a launch with ENABLE_EVOLUTION=true starts on each host.

    python scripts/search_then_train.py --name=NAME --root=FOLDER --trials=12 ... -- --config=configs/small.py ...

The words before `--` are flags of `sweep.py search`, and those after it are arguments of train.py. Both continue what
an earlier start left: a search that has ended is not repeated. The keys of the best trial come before the typed ones.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SIGNALS = signal.SIGINT, signal.SIGTERM
sys.path.insert(0, str(ROOT))

from checkpointing.bucket import failures_of, path_of
from files.json_reader import JsonError, Object, Scalar, parse_json
from reporting.sink import INTERRUPTED

LOOK_SECONDS = 0.2  # between two looks at the search
OWN_SECONDS = 2.0  # in which the search may end by a signal to the group of processes, before it is passed on
NEEDED = ("name", "root")  # flags of the search that are read here too


class Best(Object):
    """The content of best.json, which `sweep.py search` writes."""

    trial: int
    changes: dict[str, Scalar]


def best(given: dict[str, str]) -> dict[str, Scalar]:
    """Return the configuration keys of the best trial; JsonError, or one of `failures_of`, if they cannot be read."""
    path = f"{given['root']}/{given['name']}/best.json"
    found = parse_json(path_of(path).read_bytes(), Best, path)
    print(f"the best trial is trial {found['trial']}: {found['changes']}", flush=True)
    return found["changes"]


def failed(message: str, status: int) -> int:
    """Print an error; return the status."""
    print(f"error: {message}", file=sys.stderr)
    return status


def status_of(search: subprocess.Popen, asked: list[int]) -> int:
    """Return the exit status of the search, which saves and ends by the first of the signals that are `asked`."""
    while not asked and search.poll() is None:
        time.sleep(LOOK_SECONDS)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return search.wait(OWN_SECONDS)
    search.send_signal(asked[0])  # again, which does no harm, if the whole group got it
    return search.wait()


def main(words: list[str]) -> int:
    """Search, and continue as train.py; return the status of a search that did not end well, or was interrupted."""
    if "--" not in words:
        return failed("no `--`; write SEARCH_FLAGS -- TRAIN_ARGUMENTS", 2)
    flags, arguments = words[: words.index("--")], words[words.index("--") + 1 :]
    given = dict(flag.removeprefix("--").partition("=")[::2] for flag in flags)
    if missing := [f"--{name}=VALUE" for name in NEEDED if not given.get(name)]:
        return failed(f"no {missing[0]} before `--`; it says where the best trial is read, and is written with =", 2)
    asked: list[int] = []
    usual = {number: signal.signal(number, lambda number, _: asked.append(number)) for number in SIGNALS}
    if status := status_of(subprocess.Popen([sys.executable, "sweep.py", "search", *flags], cwd=ROOT), asked):
        return status
    try:
        keys = [f"--config.{key}={value}" for key, value in best(given).items()]
    except (*failures_of(given["root"]), JsonError) as error:
        return failed(f"the best trial of the search cannot be read: {error}", 1)
    for number, handler in usual.items():
        signal.signal(number, handler)
    if asked:
        return INTERRUPTED
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "train.py", *keys, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
