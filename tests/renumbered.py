# SPDX-License-Identifier: Apache-2.0
"""Runs a command whose processes have other numbers in jax than in their group, as on a TPU slice.

There libtpu numbers the processes by the place of their chips. Here jax counts them from the last one of the group.
"""

import pathlib
import runpy
import sys

import jax

ROOT = pathlib.Path(__file__).resolve().parent.parent
_initialize = jax.distributed.initialize


def initialize(coordinator: str, count: int, index: int, **how) -> None:
    """Initialize jax.distributed as the process of the opposite number; that with 0 opens the coordinator's port."""
    host = coordinator.rpartition(":")[0]
    how["coordinator_bind_address"] = coordinator.replace(host, "127.0.0.1")
    _initialize(coordinator, count, count - 1 - index, **how)


if __name__ == "__main__":
    jax.distributed.initialize = initialize
    sys.path[0] = str(ROOT)
    sys.argv = sys.argv[1:]
    runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
