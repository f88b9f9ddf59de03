# SPDX-License-Identifier: Apache-2.0
"""How a process finds the others of its run before it joins them: from variables, or as jax detects known clusters."""

import dataclasses
import os
import re
from collections.abc import Mapping

from cluster import gpus, metadata
from configs.errors import ConfigError

DEFAULT_PORT = 8476
LAST_PORT = 65535
OF_JOBS = 61440  # the first port that jax takes by the number of a job of SLURM or Open MPI
PORTS_OF_JOB = 3  # those of the coordinator, of the hub and of a study
MANAGED = ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST")  # cluster types that jax detects
ANNOUNCED = {  # a value greater than this means that other processes exist; a remedy if jax does not find them
    "OMPI_COMM_WORLD_SIZE": ("1", ""),
    "JOB_COMPLETION_INDEX": ("0", "install the Python package kubernetes, with which jax looks for them, or "),
}
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
        return with_port(self.host, self.port)

    @property
    def hub_port(self) -> int:
        """The port of the hub: the coordinator's port + 1, or - 1 if that is the last port."""
        return self.port + 1 if self.port < LAST_PORT else self.port - 1

    @property
    def study_port(self) -> int:
        """The port of a study's own hub; the trials of the study use `port` and `hub_port`."""
        return self.port + 2 if self.port + 2 <= LAST_PORT else self.port - 2


def find_group(environment: Mapping[str, str], accelerator: str, join_seconds: float) -> Group | None:
    """Return the group from the environment, else the one that jax detects on known clusters; None for one process.

    Variables take precedence over jax: JAX_COORDINATOR_ADDRESS, JAX_PROCESS_INDEX, JAX_PROCESS_COUNT; or
    TPU_COORDINATOR_ADDRESS, TPU_WORKER_ID, TPU_WORKER_COUNT; or MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE. Raises
    ConfigError if one is missing or not a number, if two of them contradict each other, or if they make a TPU slice
    anything but a run of one process on each host. Without these variables, a process that uses the chips of one host
    alone is in no group.
    """
    groups = [group for names in FAMILIES if (group := _of_variables(names, environment))]
    for other in groups[1:]:
        _check_same(groups[0], other)
    one_host = any(environment.get(name) == bounds for name, bounds in ONE_HOST.items())
    if groups and accelerator == "tpu" and not one_host:
        _check_hosts(groups[0], environment)
    if groups:
        place = _place_on_host(environment) if accelerator == "gpu" and groups[0].count > 1 else None
        return dataclasses.replace(groups[0], local_devices=gpus.of_process(environment, place))
    if accelerator == "tpu":
        return None if one_host or _is_only_worker(environment) else _found_by_jax(join_seconds)
    group = _found_by_jax(join_seconds) if any(name in environment for name in MANAGED) else None
    if group is None:
        _check_alone(environment)
    return group


def _of_variables(family: tuple, environment: Mapping[str, str]) -> Group | None:
    """Return the group that a family of variables describes; None if none of them is set."""
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
    host, port = address_of(given[0], environment)
    index, count = (_number(name, environment[name]) for name in given[1:])
    if not 0 <= index < count:
        raise ConfigError(
            f"{given[1]}={index} must be 0 or greater and less than {given[2]}={count}; processes count from 0"
        )
    return Group(host, port, index, count, _text({name: environment[name] for name in given}))


def address_of(name: str, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the host and the port of an address in a variable; ConfigError if it is not one."""
    address = ADDRESS.fullmatch(environment[name])
    if not address:
        raise ConfigError(f"{name}={environment[name]} is not an address; write HOST:PORT or [IPV6]:PORT")
    what, port = f"the port of {name}", address["port"] or DEFAULT_PORT
    if name == "MASTER_ADDR" and not address["port"] and environment.get("MASTER_PORT"):
        what, port = "MASTER_PORT", environment["MASTER_PORT"]
    number = _number(what, port)
    if not 1 < number <= LAST_PORT:
        raise ConfigError(f"{what}={number} must be greater than 1 and at most {LAST_PORT}")
    host = address["bracketed"] or address["host"] or address["bare"]
    try:
        host.encode("idna")
    except UnicodeError:  # an empty part between dots, or one of over 63 characters
        raise ConfigError(f"{name}={environment[name]} is not an address: no host is called {host}") from None
    return host, number


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


def _place_on_host(environment: Mapping[str, str]) -> int | None:
    """Return the number of this process among those that torchrun started on this host; None without torchrun."""
    by_torchrun = all(environment.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return _number("LOCAL_RANK", environment["LOCAL_RANK"]) if by_torchrun else None


def _is_only_worker(environment: Mapping[str, str]) -> bool:
    """Return whether the variables of a TPU slice say that it has one host."""
    hosts = next((environment[name] for name in HOSTS if environment.get(name)), ",")
    return "," not in hosts and not environment.get("MEGASCALE_NUM_SLICES")


def _check_alone(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if a variable says that there are other processes."""
    for name, (alone, remedy) in ANNOUNCED.items():
        if _number(name, environment.get(name) or alone) > int(alone):
            raise ConfigError(
                f"{name}={environment[name]} says that there are other processes, but jax does not find them; "
                f"{remedy}set {', '.join(names[0] for names in FAMILIES[0])}"
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
    return Group(host, _apart(int(port)), index, count, "jax", own)


def _apart(port: int) -> int:
    """Return a port in place of jax's choice for a job, so that the ports of successive jobs do not overlap.

    A user's JAX_COORDINATOR_PORT stays.
    """
    if port < OF_JOBS or os.environ.get("JAX_COORDINATOR_PORT"):
        return port
    return OF_JOBS + (port - OF_JOBS) * PORTS_OF_JOB % (LAST_PORT - OF_JOBS)  # a multiple of PORTS_OF_JOB


def with_port(host: str, port: int) -> str:
    """Return the address as jax writes it, with brackets around that of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
