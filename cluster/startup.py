# SPDX-License-Identifier: Apache-2.0
"""Before jax is imported, chooses the platform of a command and the number of simulated devices."""

import contextlib
import ctypes
import gc
import glob
import importlib.util
import logging
import os
import pathlib
import re
import sys
from collections.abc import Mapping

from cluster import compiled_programs, gpus, metadata
from cluster.hub import RunError
from configs.errors import ConfigError, shown
from configs.topologies import Topology
from settings.environment import UNREAD_VARIABLES, unread_lines

GOOGLE_PCI_VENDOR = "0x1ae0"
# TensorFlow only reads data and writes events. It imports faster without its own Keras, which is not used.
QUIET_TENSORFLOW = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "TF_USE_LEGACY_KERAS": "1"}
# Importing and tracing create millions of objects and hardly any cycle. Python's default garbage collection thresholds
# slow down the start, and sometimes delay a step on one host, for which all others wait.
RARE_COLLECTIONS = (100_000, 20, 20)
ONE_DEVICE = {
    # libtpu does not wait for the other hosts of a slice.
    "tpu": {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_VISIBLE_CHIPS": "0",
            "CLOUD_TPU_TASK_ID": "0"},
    "gpu": {"JAX_CUDA_VISIBLE_DEVICES": "0"},  # the first that CUDA shows
    "cpu": {},
}  # fmt: skip
CUDA = ("jax_cuda12_plugin", "jax_cuda13_plugin")
MOST_SIMULATED = 256  # devices of a process: XLA takes 2 GiB for 256, over 22 GiB for 1,023, and aborts from 2,048 on
# XLA's CPU collectives abort when a participant is late, which happens with 32 device threads on 2 cores.
PATIENCE = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 300,
    "xla_cpu_collective_call_terminate_timeout_seconds": 3600,
    "xla_cpu_collective_timeout_seconds": 3600,
}


def attached_accelerator() -> str:
    """Return "tpu", "gpu" or "cpu" from device files and JAX_PLATFORMS, without initializing a device.

    Raises ConfigError if JAX_PLATFORMS names no known platform, or an accelerator that this machine does not have; and
    on a TPU VM that shows no chips, unless JAX_PLATFORMS asks for the CPU.
    """
    vendors = (pathlib.Path(p).read_text().strip() for p in glob.glob("/sys/bus/pci/devices/*/vendor"))
    has_tpu = bool(glob.glob("/dev/accel[0-9]*")) or (
        bool(glob.glob("/dev/vfio/[0-9]*")) and GOOGLE_PCI_VENDOR in vendors
    )
    has_gpu = bool(gpus.files()) and _has_cuda()
    found = "tpu" if has_tpu else "gpu" if has_gpu else "cpu"
    asked = os.environ.get("JAX_PLATFORMS", "").split(",")[0].replace("cuda", "gpu")
    if asked == "cpu":
        return asked
    if found == "cpu" and (kind := metadata.attribute("accelerator-type")):
        raise ConfigError(
            f"this machine is a TPU VM ({kind}), but shows no chips: its software version is that of another TPU, its "
            "driver failed, or this container was given no devices; fix that, or set JAX_PLATFORMS=cpu to use its CPU"
        )
    if not asked:
        return found
    if asked not in ("tpu", "gpu"):
        raise ConfigError(f"JAX_PLATFORMS={asked} is not one of cpu, gpu, cuda, tpu; unset it to use the {found}")
    if asked != found:
        raise ConfigError(f"JAX_PLATFORMS={asked}, but this machine has no {asked}; unset it to use the {found}")
    return found


def _has_cuda() -> bool:
    """Return whether the driver's library loads; containers may have it on LD_LIBRARY_PATH alone."""
    with contextlib.suppress(OSError):
        return bool(ctypes.CDLL("libcuda.so.1"))
    return False


def is_simulation(topology: Topology | None, accelerator: str) -> bool:
    """Return whether to simulate the topology's chips: it names an accelerator, and none is attached."""
    return topology is not None and topology.accelerator != "cpu" and accelerator == "cpu"


def choose_platform(topology: Topology | None, accelerator: str, cache: pathlib.Path) -> None:
    """Set the variables that jax reads at import; ConfigError if the attached accelerator is not the topology's."""
    choose_libraries()
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache / compiled_programs.FOLDER))
    compiled_programs.watch(os.environ["JAX_COMPILATION_CACHE_DIR"])
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")  # a restart needs many small programs
    if accelerator == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    elif topology and topology.accelerator != accelerator:
        raise ConfigError(
            f"--topology={topology.name} is a {topology.accelerator} slice, but a {accelerator} is attached; "
            f"omit --topology, or set JAX_PLATFORMS=cpu to simulate it"
        )
    elif accelerator == "gpu" and any(map(importlib.util.find_spec, CUDA)) and not os.environ.get("JAX_PLATFORMS"):
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"  # otherwise jax first looks for TPUs, since libtpu is installed


def use_one_device(accelerator: str) -> None:
    """Use the first chip or GPU of this host, unless the environment chooses; call this before jax is imported."""
    variables = ONE_DEVICE[accelerator]
    if not (variables.keys() | {"TPU_VISIBLE_DEVICES"}) & os.environ.keys():
        os.environ.update(variables)


def shares_of_devices(workers: int, topology: Topology | None = None) -> list[dict[str, str]]:
    """Return for each worker of a study on this machine the variables that give its trials their devices.

    Raises ConfigError if the workers cannot share the accelerator, or a share is not the devices of the topology.
    """
    accelerator = attached_accelerator()
    if workers == 1 or accelerator == "cpu":
        return [{}] * workers
    if accelerator == "tpu":
        raise ConfigError(f"--workers={workers}: a trial uses all chips of this host; omit the flag")
    shares = gpus.shares(os.environ, workers)
    if topology and topology.chips != len(shares[0]):
        raise ConfigError(
            f"--workers={workers}: a trial has {len(shares[0])} of the GPUs here, and --topology={topology.name} has "
            f"{topology.chips}; omit --topology"
        )
    return [{"JAX_CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def choose_caching(accelerator: str, num_processes: int) -> None:
    """Switch the cache of compiled programs off for several processes on GPUs, unless the environment says otherwise.

    They tune a program together (XLA's sharded autotuning). One that loads it from its cache takes no part, and
    the others wait for ever; jax writes the cache in process 0 alone.
    """
    if accelerator == "gpu" and num_processes > 1 and "JAX_ENABLE_COMPILATION_CACHE" not in os.environ:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        update_imported_jax(jax_enable_compilation_cache=False)


def update_imported_jax(**values) -> None:
    """Set values of jax's configuration if jax is imported already, as to detect SLURM: it has read the variables."""
    if "jax" in sys.modules:
        for name, value in values.items():
            sys.modules["jax"].config.update(name, value)


def choose_libraries() -> None:
    """Set up TensorFlow's import, the logs for buckets and the garbage collector; call this before other imports."""
    gc.set_threshold(*RARE_COLLECTIONS)
    for library in ("gcsfs", "google.auth"):  # they log the errors that they raise, with tracebacks
        logging.getLogger(library).setLevel(logging.CRITICAL)
    for name, value in QUIET_TENSORFLOW.items():
        os.environ.setdefault(name, value)


def simulate(num_devices: int, num_processes: int = 1) -> int:
    """Simulate this process's share of `num_devices` CPU devices; 0 takes the number per process from the environment.

    Returns the number of devices of all processes. Raises ConfigError if `num_devices` is not divisible by the number
    of processes, or if one process would simulate too many.
    """
    if num_devices % num_processes:
        raise ConfigError(
            f"{num_devices} simulated devices cannot be divided evenly among {num_processes} processes; "
            f"use a multiple of {num_processes}"
        )
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    name = flag[0].rpartition("=")[0] if flag else "JAX_NUM_CPU_DEVICES"
    number = flag[1] if flag else os.environ.get(name) or "1"
    if not re.fullmatch("0{0,9}[1-9][0-9]{0,9}", number):
        given = f"{'XLA_FLAGS=' if flag else ''}{name}={shown(number)}"
        raise ConfigError(f"{given} is not a whole number greater than 0; unset it, or correct it")
    local = num_devices // num_processes or int(number)
    if local > MOST_SIMULATED:
        raise ConfigError(f"one process cannot simulate {local:,} devices, only {MOST_SIMULATED:,}; use a smaller mesh")
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [f for f in flags if "xla_force_host_platform_device_count" not in f]
    given = {f.lstrip("-").split("=")[0] for f in flags}
    flags += [f"--{name}={seconds}" for name, seconds in PATIENCE.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={local}"])
    if read := os.environ.pop("JAX_NUM_CPU_DEVICES", ""):
        try:
            update_imported_jax(jax_num_cpu_devices=-1)  # its default, with which the flag decides
        except RuntimeError:
            raise ConfigError(
                f"JAX_NUM_CPU_DEVICES={read}: jax has already made its devices; join before jax is used"
            ) from None
    return local * num_processes


def drop_native_stdout() -> None:
    """Drop the output of C++ libraries to stdout, such as gloo's connections; Python's output stays."""
    usual = sys.stdout
    usual.flush()
    sys.stdout = open(os.dup(usual.fileno()), "w", encoding=usual.encoding, errors=usual.errors)  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=usual.line_buffering, write_through=usual.write_through)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, usual.fileno())
    os.close(nowhere)


def check_platform(accelerator: str) -> None:
    """Raise ConfigError if jax silently uses the CPU and not the attached accelerator, RunError if it fails."""
    import jax  # default_backend() initializes the devices

    try:
        found = jax.default_backend()
    except RuntimeError as error:  # another process may use it still, or come too late
        raise RunError(f"jax cannot use the {accelerator} of this machine: {' '.join(str(error).split())}") from error
    if found != accelerator:
        raise ConfigError(
            f"a {accelerator} is attached, but jax uses the {found}: another process uses the {accelerator}, or its "
            f"packages are not installed (`make setup ACCELERATOR={accelerator}`); set JAX_PLATFORMS=cpu to use the CPU"
        )


def notes(environment: Mapping[str, str], dtype: str) -> list[str]:
    """Return a line for each environment variable of other systems that is set but ignored here.

    Raises ConfigError if XLA_USE_BF16 contradicts `dtype`, which is model.dtype.
    """
    if environment.get("XLA_USE_BF16") == "1" and dtype == "float32":
        raise ConfigError("XLA_USE_BF16=1 and model.dtype=float32 contradict each other; unset one")
    return [f"Note: {line}" for line in unread_lines(environment, UNREAD_VARIABLES)]
