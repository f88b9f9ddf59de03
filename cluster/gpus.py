# SPDX-License-Identifier: Apache-2.0
"""Finds which GPUs of its host a process uses."""

import glob
from collections.abc import Mapping

from configs.errors import ConfigError

CHOOSE = ("JAX_LOCAL_DEVICE_IDS", "JAX_CUDA_VISIBLE_DEVICES")  # jax reads them


def files() -> list[str]:
    """Return the device files of this machine's GPUs; WSL has one for all of them."""
    return glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/dxg")


def of_process(environment: Mapping[str, str], place: int | None) -> tuple[int, ...] | None:
    """Return the GPU of a process that shares its host with others; None for all that are visible.

    jax's own detection gives each process of SLURM and Open MPI one GPU, also if it has the host to itself, and
    processes of torchrun all of them, also if they share it.

    Args:
      place: number of the process among those of its host; None if unknown.
    """
    are_chosen = any(environment.get(name) for name in CHOOSE)
    if place is None or are_chosen or "," not in environment.get("CUDA_VISIBLE_DEVICES", ","):
        return None
    nodes, tasks = environment.get("SLURM_STEP_NUM_NODES"), environment.get("SLURM_NTASKS")
    on_host = environment.get("LOCAL_WORLD_SIZE") or environment.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    is_alone = on_host == "1" if on_host else nodes is not None and nodes == tasks
    return None if is_alone else (place,)


def shares(environment: Mapping[str, str], workers: int) -> list[list[str]]:
    """Return for each of the workers of a study on this host its numbers among the visible GPUs, equally many.

    Raises ConfigError if there are fewer GPUs than workers.
    """
    chosen, visible = environment.get("JAX_CUDA_VISIBLE_DEVICES", "all"), environment.get("CUDA_VISIBLE_DEVICES")
    devices = files() if visible is None else visible.strip(",").split(",")
    numbers = [str(number) for number in range(len(devices))] if chosen in ("", "all") else chosen.split(",")
    if workers > len(numbers):
        raise ConfigError(f"--workers={workers}: at most {len(numbers)}, since each worker takes a GPU of its own")
    each = len(numbers) // workers
    return [numbers[worker * each : (worker + 1) * each] for worker in range(workers)]
