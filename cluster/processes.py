# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: how they find each other, agree on values and learn that another one has ended.

`find` returns this process's group without initializing a device, and `start` joins it. Without a group, every
function here behaves as in a run of one process.
"""

import dataclasses
import logging
import math
import os
import pathlib
import re
import signal
import sys
from collections.abc import Callable, Mapping

from cluster import addresses, gpus, metadata, secret
from cluster.blame import Heartbeat, to_blame
from cluster.hub import Hub
from cluster.line import Line
from configs.errors import ConfigError

DEFAULT_PORT = 8476
LAST_PORT = 65535
MANAGED = ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST")  # cluster types that jax detects
ANNOUNCED = {  # a value greater than this means that other processes exist; a remedy if jax does not find them
    "OMPI_COMM_WORLD_SIZE": ("1", ""),
    "JOB_COMPLETION_INDEX": ("0", "install the Python package kubernetes, with which jax looks for them, or "),
}
SETTLE_SECONDS = 2.0
ANSWER_SECONDS = 2.0
HEARTBEAT_SECONDS = 7 * 86400  # disables jax's own watch, which aborts from C++; the hub and the watchdog replace it
FAMILIES = (  # variables for the address, the process index and the count; alternative names are in one tuple
    (("JAX_COORDINATOR_ADDRESS",), ("JAX_PROCESS_INDEX", "JAX_PROCESS_ID"), ("JAX_PROCESS_COUNT", "JAX_NUM_PROCESSES")),
    (("TPU_COORDINATOR_ADDRESS",), ("TPU_WORKER_ID",), ("TPU_WORKER_COUNT",)),
    (("MASTER_ADDR",), ("RANK",), ("WORLD_SIZE",)),
)
ADDRESS = re.compile(  # a bare IPv6 address has no port
    r"(\[(?P<bracketed>[^][/]+)\]|(?P<host>[^][/:]+)|(?P<bare>[^][/]*:[^][/]*:[^][/]*))(:(?P<port>[^:]*))?"
)
OF_OTHERS = ("TPU_WORKER_ID",)  # also set on every GKE worker, where jax finds the rest
ONE_HOST = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_HOST_BOUNDS": "1,1,1"}  # libtpu uses the chips of one host only
HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")  # of a slice; jax asks the metadata server even with them
LISTENING = "JAX_COORDINATOR_BIND_ADDRESS"  # jax's variable, for a coordinator address that is not local to process 0


@dataclasses.dataclass(frozen=True)
class Group:
    """The group of this process and its place in it.

    Attributes:
      host, port: address of jax's coordinator, in process 0.
      source: the variables, or the system, that these values come from.
      local_devices: ids of the GPUs that this process uses; None for all.
    """

    host: str
    port: int
    index: int
    count: int
    source: str
    local_devices: tuple[int, ...] | None = None

    @property
    def coordinator(self) -> str:
        """The coordinator's address, as jax writes it."""
        return _with_port(self.host, self.port)

    @property
    def hub_port(self) -> int:
        """The port of the hub: the coordinator's port + 1, or - 1 if that is the last port."""
        return self.port + 1 if self.port < LAST_PORT else self.port - 1

    @property
    def study_port(self) -> int:
        """The port of a study's own hub; the trials of the study use `port` and `hub_port`."""
        return self.port + 2 if self.port + 2 <= LAST_PORT else self.port - 2


def find(environment: Mapping[str, str], accelerator: str, join_seconds: float) -> Group | None:
    """Return the group from the environment, else the one that jax detects on known clusters; None for one process.

    Variables take precedence over jax: JAX_COORDINATOR_ADDRESS, JAX_PROCESS_INDEX, JAX_PROCESS_COUNT; or
    TPU_COORDINATOR_ADDRESS, TPU_WORKER_ID, TPU_WORKER_COUNT; or MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE. Raises
    ConfigError if one is missing or not a number, if two of them contradict each other, or if they make a TPU slice
    anything but a run of one process on each host. A process that uses the chips of one host alone is in no group.
    """
    groups = [group for names in FAMILIES if (group := _of_variables(names, environment))]
    for other in groups[1:]:
        _check_same(groups[0], other)
    one_host = any(environment.get(name) == bounds for name, bounds in ONE_HOST.items())
    if groups:
        if accelerator == "tpu" and not one_host:
            _check_hosts(groups[0], environment)
        by_torchrun = all(environment.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        may_share = accelerator == "gpu" and groups[0].count > 1 and by_torchrun
        place = _number("LOCAL_RANK", environment["LOCAL_RANK"]) if may_share else None
        return dataclasses.replace(groups[0], local_devices=gpus.of_process(environment, place))
    hosts = next((environment[name] for name in HOSTS if environment.get(name)), ",")
    only_worker = "," not in hosts and not environment.get("MEGASCALE_NUM_SLICES")
    if accelerator == "tpu" and (one_host or only_worker):
        return None
    managed = accelerator == "tpu" or any(name in environment for name in MANAGED)
    group = _found_by_jax(join_seconds) if managed else None
    for name, (alone, remedy) in ANNOUNCED.items():
        if group is None and accelerator != "tpu" and _number(name, environment.get(name) or alone) > int(alone):
            raise ConfigError(
                f"{name}={environment[name]} says that there are other processes, but jax does not find them; "
                f"{remedy}set {', '.join(names[0] for names in FAMILIES[0])}"
            )
    return group


def _of_variables(family: tuple, environment: Mapping[str, str]) -> Group | None:
    given = [next((name for name in names if environment.get(name)), None) for names in family]
    if all(name is None or name in OF_OTHERS for name in given):
        return None
    missing = [" or ".join(names) for names, name in zip(family, given, strict=True) if name is None]
    if missing:
        there = ", ".join(f"{name}={environment[name]}" for name in given if name)
        raise ConfigError(f"{there} without {', '.join(missing)}; set all three, or none for a single process")
    for names in family:
        values = {name: environment[name] for name in names if environment.get(name)}
        if len(set(values.values())) > 1:
            raise ConfigError(f"{_text(values)} contradict each other; unset all but one")
    host, port = _address(given[0], environment)
    index, count = (_number(name, environment[name]) for name in given[1:])
    if not 0 <= index < count:
        raise ConfigError(
            f"{given[1]}={index} must be 0 or greater and less than {given[2]}={count}; processes count from 0"
        )
    return Group(host, port, index, count, _text({name: environment[name] for name in given}))


def _address(name: str, environment: Mapping[str, str]) -> tuple[str, int]:
    address = ADDRESS.fullmatch(environment[name])
    if not address:
        raise ConfigError(f"{name}={environment[name]} is not an address; write HOST:PORT or [IPV6]:PORT")
    what, port = f"the port of {name}", address["port"] or DEFAULT_PORT
    if name == "MASTER_ADDR" and not address["port"] and environment.get("MASTER_PORT"):
        what, port = "MASTER_PORT", environment["MASTER_PORT"]
    number = _number(what, port)
    if not 1 < number <= LAST_PORT:
        raise ConfigError(f"{what}={number} must be greater than 1 and at most {LAST_PORT}")
    return address["bracketed"] or address["host"] or address["bare"], number


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text} is not a whole number") from None


def _check_same(one: Group, other: Group) -> None:
    ours, theirs = dataclasses.asdict(one), dataclasses.asdict(other)
    for what in ("count", "index", "host", "port"):
        if ours[what] != theirs[what]:
            raise ConfigError(
                f"{one.source} and {other.source} contradict each other in the {what}; unset one group of variables"
            )


def _check_hosts(group: Group, environment: Mapping[str, str]) -> None:
    """Raise ConfigError if torchrun starts several processes on a TPU host, or makes each host a run of its own."""
    local = environment.get("LOCAL_WORLD_SIZE", "1")
    if local != "1":
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={local}, as torchrun --nproc_per_node={local} sets it, but one process drives all chips "
            "of a TPU host; start the command once on each host, without torchrun or with --nproc_per_node=1"
        )
    hosts = (metadata.count_hosts(environment) or 1) if group.count == 1 else 1
    if hosts > 1:
        raise ConfigError(
            f"{group.source} makes this process a run of its own, but its TPU slice has {hosts} hosts, and each would "
            f"train alone, as with torchrun --nnodes=1; start the command on each host without torchrun, or by "
            f"`pod.py launch`, or give torchrun --nnodes={hosts} and one --master_addr"
        )


def _text(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _found_by_jax(join_seconds: float) -> Group | None:
    """Return the group of a TPU slice, SLURM, Open MPI or Kubernetes; None if there is only one process."""
    from jax._src.clusters import ClusterEnv  # no public function detects the cluster without joining it

    try:
        address, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, int(join_seconds)
        )
    except (RuntimeError, ValueError, LookupError, TypeError, OSError) as error:
        variables = ", ".join(names[0] for names in FAMILIES[0])
        raise ConfigError(f"jax does not find the other processes ({error}); set {variables}") from error
    if address is None or count == 1:
        return None
    host, _, port = address.rpartition(":")
    own = gpus.of_process(os.environ, devices[0] if devices else None)
    return Group(host, int(port), index, count, "jax", own)


_line: Line | None = None
_hub: Hub | None = None


def start(
    group: Group, join_seconds: float, on_end: Callable[[str, int], None], workdir: pathlib.Path | None = None
) -> None:
    """Join the group and initialize jax.distributed, before any device is initialized; RunError names late processes.

    Args:
      on_end: ends this process; called with a line and an exit status, in a thread, when another one has died or
        failed.
      workdir: a folder that all processes share; process 0 may keep the secret of the run there while they join.
    """
    import jax

    address = join(group, group.hub_port, join_seconds, on_end, workdir)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    jax.distributed.initialize(
        group.coordinator, group.count, group.index, local_device_ids=group.local_devices,
        initialization_timeout=int(join_seconds) + 1, heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        cluster_detection_method="deactivate",
        coordinator_bind_address=address and _with_port(address, group.port),
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
        return _address(LISTENING, os.environ)[0]
    address = addresses.own_address(group.host)
    if address is None:
        _warn(
            f"{group.host} is not an address of this machine that others can use, so ports {group.port} and "
            f"{port} are open on all addresses; to open one, set {LISTENING}=ADDRESS:{group.port}"
        )
    return address


def _with_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
    """In process 0, which has the hub, wait until all other processes know why the run ends, or a time limit."""
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
