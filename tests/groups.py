# SPDX-License-Identifier: Apache-2.0
"""Starts commands as the processes of one run, on this machine."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import threading

from pods import local
from tests import warm

SECONDS, ABORT_SECONDS = 240, 60  # for a group to end, and for its stacks to be written if it does not
LISTENS = "0A"  # the state of a socket in /proc/net/tcp
_started: list[subprocess.Popen] = []


def free_ports() -> int:
    """Return a free port that the system gives to no connection; the next one, the hub's, is free too."""
    return local.free_port()


def listening(port: int) -> set[str]:
    """Return the addresses on which programs of this machine listen at a port."""
    found = set()
    for family, file in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in pathlib.Path("/proc/net", file).read_text().splitlines()[1:]:
            _, (address, _, number), _, state, *_ = (
                part.partition(":") if ":" in part else part for part in line.split()
            )
            if state == LISTENS and int(number, 16) == port:
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                found.add(socket.inet_ntop(family, b"".join(words)))
    return found


def start(
    arguments: list[str], *, count: int, cache: pathlib.Path, devices: int = 8, absent: tuple[int, ...] = (),
    variables: dict[int, dict[str, str]] | None = None, port: int | None = None,
) -> list[subprocess.Popen]:  # fmt: skip
    """Start `count` processes of a Python program with `devices` simulated devices together.

    Args:
      absent: numbers of processes that are not started.
      variables: more of the environment, by number of the process.
      port: of the coordinator, which the hub's follows; None: any.
    """
    port = port or free_ports()
    started = [
        warm.start(
            arguments, environment(port, index, count, devices // count, cache) | (variables or {}).get(index, {})
        )
        for index in range(count)
        if index not in absent
    ]
    _started.extend(started)
    return started


def start_alone(arguments: list[str], *, cache: pathlib.Path) -> subprocess.Popen:
    """Start a Python program that is in no group, with one device."""
    process = warm.start(arguments, simulated(1, cache))
    _started.append(process)
    return process


def finish(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Return (status, stdout, stderr) of each, once all have ended.

    After SECONDS they are aborted; then stderr ends with the stacks of their threads.
    """
    timer = threading.Timer(SECONDS, abort, [processes])
    timer.start()
    try:
        outputs = [process.communicate(timeout=SECONDS + ABORT_SECONDS) for process in processes]
    finally:
        timer.cancel()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def abort(processes: list[subprocess.Popen]) -> None:
    """Send SIGABRT to those that still run."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            if process.returncode is None:
                os.kill(process.pid, signal.SIGABRT)


def end_all() -> None:
    """Kill all processes that were started here, and close their pipes."""
    while _started:
        process = _started.pop()
        process.kill()
        process.communicate()


def environment(port: int, index: int, count: int, devices: int, cache: pathlib.Path) -> dict[str, str]:
    """Return the variables of one process of a group."""
    return simulated(devices, cache) | placed(port, index, count)


def simulated(devices: int, cache: pathlib.Path) -> dict[str, str]:
    """Return the variables of a process that is to simulate devices."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"} | {
        "XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"]),
        "XDG_CACHE_HOME": str(cache),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }


def placed(port: int, index: int, count: int) -> dict[str, str]:
    """Return the variables that place a process; those of torchrun for 2 processes, to test them too."""
    if count == 2:
        return {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(index), "WORLD_SIZE": "2"}
    address = f"localhost:{port}"
    return {"JAX_COORDINATOR_ADDRESS": address, "JAX_PROCESS_INDEX": str(index), "JAX_PROCESS_COUNT": str(count)}
