# SPDX-License-Identifier: Apache-2.0
"""A small file for each process that says how it is, for `pod.py status`."""

import json
import os
import pathlib
import socket
import time

import jax

from parallelism import identity, processes
from training.throughput import GIB, host_memory_gib

INTERVAL_SECONDS = 1.0


class Heartbeat:
    """Writes WORKDIR/workers/<process>.json whenever a step has ended, at most once a second."""

    def __init__(self, workdir: pathlib.Path):
        self.path = workdir / "workers" / f"{processes.index()}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.written = 0.0
        self.constant = {
            "process": processes.index(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "code": identity.code_digest(),
        }

    def beat(self, step: int, phase: str = "training") -> None:
        """`step` ended, or another phase began."""
        now = time.time()
        if phase == "training" and now - self.written < INTERVAL_SECONDS:
            return
        self.written = now
        line = self.constant | {
            "step": step,
            "phase": phase,
            "time": now,
            "host_memory_gib": host_memory_gib()[0],
            "device_memory_gib": _device_memory_gib(),
        }
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(line))
        partial.replace(self.path)


def _device_memory_gib() -> list[float] | None:
    stats = [device.memory_stats() for device in jax.local_devices()]
    return [device["bytes_in_use"] / GIB for device in stats] if all(stats) else None
