# SPDX-License-Identifier: Apache-2.0
"""Joins the processes of a run from a Python program, as the commands do by their flags; see docs/python.md."""

import atexit
import contextlib
import functools
import math
import os
import sys

from cluster import identity, processes, startup
from cluster.group import Group, find_group
from core import ending
from input_pipeline.cache import cache_path
from settings.resolving import environment_mesh

JOIN_SECONDS = 300


def join(default_devices: int = 0) -> str:
    """Join the other processes of the run, if any; call it before jax is used. A second call changes nothing.

    Without an accelerator, devices are simulated: as many as TPU_MESH_CONFIG has, or as XLA_FLAGS and
    JAX_NUM_CPU_DEVICES ask for.

    Processes that are late end this one with status 1, after a line that names them.

    Args:
      default_devices: simulated devices of all processes if no variable says how many; 0: one for each process.

    Returns:
      the address of the coordinator, "host:port"; "" if this process is alone.

    Raises:
      ConfigError: variables that place a process contradict each other, or one is missing; or processes differ in
        code, libraries or variables.
      RunError: process 0 cannot be reached or is silent.
    """
    accelerator = startup.attached_accelerator()
    startup.choose_platform(None, accelerator, cache_path(""))
    startup.update_imported_jax(  # as optax imports it
        jax_platforms=os.environ.get("JAX_PLATFORMS") or None,
        jax_compilation_cache_dir=os.environ["JAX_COMPILATION_CACHE_DIR"],
        jax_persistent_cache_min_compile_time_secs=float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]),
    )
    group = find_group(os.environ, accelerator, JOIN_SECONDS)
    num_processes = group.count if group else 1
    startup.choose_caching(accelerator, num_processes)
    if accelerator == "cpu":
        is_asked = "device_count" in os.environ.get("XLA_FLAGS", "") or os.environ.get("JAX_NUM_CPU_DEVICES")
        mesh = environment_mesh(os.environ)
        number = math.prod(mesh.values()) if mesh else 0 if is_asked else default_devices
        startup.simulate(number, num_processes)
    if group is None:
        return ""
    _start(group)
    return group.coordinator


@functools.cache
def _start(group: Group) -> None:
    processes.start(group, JOIN_SECONDS, ending.with_the_others)
    atexit.register(_part)
    identity.check_same()


def _part() -> None:
    """Wait until the other processes are done; after an exception notify them, so that they end too.

    Then this one ends at once: jax's own exit would wait for the others for minutes, and abort.
    """
    error = vars(sys).get("last_value")  # set once an exception has ended the program
    if error is None:
        processes.leave()
    else:
        processes.fail(f"{type(error).__name__}: {error}", 1)
        if "ps1" in vars(sys):  # an interactive Python goes on after exceptions: the last one did not end it
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # a closed pipe or stream
                stream.flush()
        os._exit(1)
