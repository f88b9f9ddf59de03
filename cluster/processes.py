# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: how they join, agree on values and learn that another one has ended.

`start` joins the group that cluster/group.py has found. Without a group, every function here behaves as in a run of one
process.
"""

import dataclasses
import logging
import math
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Mapping

from cluster import addresses, secret
from cluster.blame import Heartbeat, to_blame
from cluster.group import Group, address_of, with_port
from cluster.hub import Hub
from cluster.line import Line
from configs.errors import ConfigError

SETTLE_SECONDS = 2.0
ANSWER_SECONDS = 2.0
HEARTBEAT_SECONDS = 7 * 86400  # disables jax's own watch, which aborts from C++; the hub and the watchdog replace it
LISTENING = "JAX_COORDINATOR_BIND_ADDRESS"  # jax's variable, for a coordinator address that is not local to process 0

_line: Line | None = None
_hub: Hub | None = None


def start(
    group: Group, join_seconds: float, on_end: Callable[[str, int], None], workdir: pathlib.Path | None = None
) -> None:
    """Join the group and initialize jax.distributed, before any device is initialized.

    If processes are late, `on_end` is called with a line that names them. Raises RunError if process 0 cannot be
    reached or is silent.

    Args:
      on_end: ends this process; called with a line and an exit status, in a thread, when another one has died,
        failed or not joined in time.
      workdir: a folder that all processes share; process 0 may keep the secret of the run there while they join.
    """
    import jax

    address = join(group, group.hub_port, join_seconds, on_end, workdir)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    jax.distributed.initialize(
        group.coordinator, group.count, group.index, local_device_ids=group.local_devices,
        initialization_timeout=int(join_seconds) + 1, heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        cluster_detection_method="deactivate",
        coordinator_bind_address=address and with_port(address, group.port),
    )  # fmt: skip
    for number, handler in handlers.items():  # jax has replaced the handler of SIGTERM
        signal.signal(number, handler)


def join(
    group: Group, port: int, join_seconds: float, on_end: Callable[[str, int], None],
    workdir: pathlib.Path | None = None,
) -> str | None:  # fmt: skip
    """Connect to the hub, which process 0 starts at `port`; return when all processes have joined. It needs no jax.

    The other arguments and errors are those of `start`. Returns the address that process 0 listens on; None in other
    processes, and for all addresses.
    """
    global _line, _hub
    run_secret = secret.RunSecret(os.environ, workdir, first=group.index == 0)
    address = _listening_address(group, port) if group.index == 0 else None

    def withdraw_and_end(line: str, status: int) -> None:
        run_secret.withdraw()
        on_end(line, status)

    try:
        if group.index == 0:
            addresses.listen(address, group.port).close()  # an error if another program listens there
            listener = addresses.listen(address, port)
            found = run_secret.find()
            if found.source == secret.NOWHERE:
                _warn(
                    f"no secret protects this run: anyone who can reach port {port} of {group.host} can end it; "
                    f"set {secret.VARIABLE} to the same secret in all processes"
                )
            _hub = Hub(listener, group.count, join_seconds, found)
        _line = Line(
            group.host, port, index=group.index, count=group.count, join_seconds=join_seconds,
            on_end=withdraw_and_end, find_secret=run_secret.find,
        )  # fmt: skip
        _line.join()
    finally:
        run_secret.withdraw()
    return address


def _listening_address(group: Group, port: int) -> str | None:
    """Return the address where process 0 opens the coordinator's port and the hub's `port`.

    None for all addresses, if the group's host is not a local one.
    """
    if os.environ.get(LISTENING):
        return address_of(LISTENING, os.environ)[0]
    address = addresses.own_address(group.host)
    if address is None:
        _warn(
            f"{group.host} is not an address of this machine that others can use, so ports {group.port} and "
            f"{port} are open on all addresses; to open one, set {LISTENING}=ADDRESS:{group.port}"
        )
    return address


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr, flush=True)


def index() -> int:
    """Return the index of this process in its group, from 0; on a TPU slice jax.process_index() may be another one."""
    return _line.index if _line else 0


def count() -> int:
    return _line.count if _line else 1


def name(number: int) -> str:
    """Return the name of a process in messages: its index and host."""
    return f"process {number} ({_line.hosts[number]})" if _line else f"process {number}"


def log_file(workdir: pathlib.Path) -> pathlib.Path:
    return workdir / "logs" / f"train_worker_{index()}.out"


def gather(topic: str, value) -> list:
    """All-gather a JSON value: return the values of all processes for a topic, in rank order. Waits for all."""
    return _line.gather(topic, value) if _line else [value]


def shared(topic: str, make: Callable[[], object]):
    """Broadcast the JSON value of make(), which is called only in process 0, to all processes."""
    return gather(topic, make() if index() == 0 else None)[0]


def check_same(values: Mapping[str, object], what: str) -> None:
    """Compare named values between all processes; ConfigError names process, host, item and both values."""
    first, *others = gather(what, dict(values))
    for number, theirs in enumerate(others, start=1):
        for item in sorted(first.keys() | theirs.keys()):
            if first.get(item) != theirs.get(item):
                raise ConfigError(
                    f"{name(number)} and {name(0)} differ in {what}: {item} is {theirs.get(item)} on process {number}, "
                    f"{first.get(item)} on process 0; make them equal"
                )


def ask_to_stop(hold: bool = False) -> None:
    """Ask all processes to stop at the same boundary soon; with `hold`, wait at the next one until it is agreed."""
    if _line:
        _line.ask_to_stop(hold)


def stop_agreed() -> bool:
    """Return whether a process has asked all to stop and they have agreed on a boundary."""
    return _line is not None and _line.stop_at < math.inf


def boundary() -> bool:
    """Pass a boundary of the training loop; return whether all processes stop here, as one of them has asked."""
    return _line is not None and _line.boundary()


def send_heartbeat(own: Heartbeat | None) -> None:
    """Send a heartbeat to process 0; None ends the heartbeats."""
    if _line:
        _line.send_heartbeat(dataclasses.asdict(own) if own else None)


def heartbeats(own: Heartbeat) -> list[Heartbeat]:
    """Return the last heartbeats of all processes in process 0, which has the hub; `own` elsewhere or if none exist."""
    return (_hub.heartbeats() if _hub else []) or [own]


def blame(own: Heartbeat, allowed: float = 0.0) -> str:
    """Describe the process that blocks the run, with its phase; if process 0 is silent, describe process 0 and `own`.

    Returns "" if the process that is furthest behind made progress within the last `allowed` seconds.
    """
    if _hub or not _line:
        found = to_blame(heartbeats(own))
        return found.text if found.idle > allowed else ""
    here, said = to_blame([own]).text, _line.blame(ANSWER_SECONDS, allowed)
    return said if said is not None else f"{name(0)} does not answer within {ANSWER_SECONDS:g} s; {here}"


def fail(line: str, status: int) -> None:
    """Report to the other processes why this one ends; in process 0, wait until they know."""
    if _line:
        _line.fail(line, status)
    settle()


def settle() -> None:
    """Wait in process 0, which has the hub, until all others know why the run ends; at most SETTLE_SECONDS."""
    if _hub:
        _hub.settle(SETTLE_SECONDS)
        _report_strangers(_hub)


def leave() -> None:
    """Leave the group when all processes are done; process 0, which has the hub, leaves last."""
    if _line:
        _line.leave()
    if _hub:
        _hub.close()
        _report_strangers(_hub)


def _report_strangers(hub: Hub) -> None:
    """Log a warning about refused connections, if there were any."""
    if line := hub.door.report():
        logging.getLogger("torus").warning(line)
