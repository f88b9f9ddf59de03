# SPDX-License-Identifier: Apache-2.0
"""Measures the peak speed and the memory of this hardware, and the speed of the steps of a run."""

import functools
import logging
import math
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp

from reporting.clock import OF_STEPS, Clock

GIB = 2**30
EARLIER_LOG = logging.getLogger("__main__")  # earlier tools look for lines of memory under this name


def measured_matmul_peak(size: int = 0, repetitions: int = 5) -> float:
    """Return FLOP/s of a square matrix product on the default device, from bfloat16 if supported, to float32.

    `size` 0 is 2,048 on a CPU, else 8,192: with 2,048, an H200 reaches an eighth of its peak.

    Other programs may use this CPU during the measurement, so time in which this process did not run is excluded.
    """
    on_cpu = jax.default_backend() == "cpu"
    fast = not on_cpu or has_native_bfloat16()
    size = size or (2048 if on_cpu else 8192)
    a = jnp.ones((size, size), jnp.bfloat16 if fast else jnp.float32)
    product = jax.jit(lambda a: jnp.matmul(a, a, preferred_element_type=jnp.float32)).lower(a).compile()
    cores, seconds = (available_cores() if on_cpu else 0), []
    for _ in range(repetitions):
        wall, busy = time.perf_counter(), time.process_time()
        product(a).block_until_ready()
        seconds.append(time.perf_counter() - wall)
        seconds += [(time.process_time() - busy) / cores] if cores else []
    return 2 * size**3 / min(seconds)


def available_cores() -> int:
    """Return the number of cores that this process may use, from its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    quota = pathlib.Path("/sys/fs/cgroup/cpu.max")  # "200000 100000" microseconds, or "max 100000"
    limit, _, period = (quota.read_text() if quota.exists() else "max").partition(" ")
    return cores if limit.strip() == "max" else max(1, min(cores, int(limit) // int(period)))


def has_native_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware, by /proc/cpuinfo; false if there is no such file."""
    return "avx512_bf16" in _cpuinfo() or has_amx()


def has_amx() -> bool:
    """Return whether this CPU has matrix units for bfloat16, whose peak is several times that of its vector units."""
    return "amx_bf16" in _cpuinfo()


def _cpuinfo() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    return cpuinfo.read_text() if cpuinfo.exists() else ""


def host_memory_gib() -> tuple[float, float]:
    """Return (resident memory of this process, memory of the machine) in GiB."""
    return _resident_bytes() / GIB, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB


def _resident_bytes() -> int:
    if sys.platform != "linux":  # use the peak, which is in bytes on macOS
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return os.sysconf("SC_PAGE_SIZE") * int(os.pread(_statm(os.getpid()), 128, 0).split()[1])


@functools.cache
def _statm(process: int) -> int:
    """Return a descriptor of this process's statm; opening the file for each line would take many times as long."""
    return os.open(f"/proc/{process}/statm", os.O_RDONLY)


def device_capacity_gib() -> float:
    """Return the memory that a local device gives to arrays, in GiB; infinity if an accelerator does not report it.

    For a CPU device this is its share of the machine's memory.
    """
    first = jax.local_devices()[0]
    if first.platform == "cpu":
        return host_memory_gib()[1] / jax.local_device_count()
    return (first.memory_stats() or {}).get("bytes_limit", math.inf) / GIB


def device_memory_gib() -> list[float] | None:
    """Return the memory in use on each local device in GiB; None if a device does not report it."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    return [device["bytes_in_use"] / GIB for device in stats] if all(stats) else None


def device_peak_gib() -> list[float] | None:
    """Return the highest memory in use so far on each local device in GiB; None if a device does not report it."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return [peak / GIB for peak in peaks] if None not in peaks else None


def log_memory() -> None:
    """Log the memory of this process and the peak of each local device, in 10^9 bytes; earlier tools look for these."""
    EARLIER_LOG.info(f"Host memory usage: {host_memory_gib()[0] * GIB / 1e9:.2f} GB")
    for device, peak in zip(jax.local_devices(), device_peak_gib() or [], strict=False):
        EARLIER_LOG.info(f"{device.platform.upper()} {device.id} peak memory: {peak * GIB / 1e9:.2f} GB")


class Speed:
    """The speed of the steps since the last line of metrics, from the seconds that a clock counted for them."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self._begin(clock.read())

    def _begin(self, read: dict[str, float]) -> None:
        self.before, self.steps, self.tokens, self.examples, self.flops = read, 0, 0, 0, 0.0

    def count(self, tokens: int, examples: int, flops: float) -> None:
        """Count a finished step; `flops` are those of the model."""
        self.steps, self.tokens, self.examples = self.steps + 1, self.tokens + tokens, self.examples + examples
        self.flops += flops

    def interval(self, read: dict[str, float], num_devices: int, peak_flops: float | None) -> dict:
        """Return the metrics of the steps since the last call, and reset.

        Args:
          read: seconds of the clock when the last of these steps had ended.
          peak_flops: of all devices.
        """
        spent = {phase: seconds - self.before[phase] for phase, seconds in read.items()}
        seconds, steps = max(sum(spent[phase] for phase in OF_STEPS), 1e-9), max(self.steps, 1)
        rate = self.tokens / seconds
        memory, peaks = device_memory_gib(), device_peak_gib()
        figures = {
            "step_seconds": seconds / steps,
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / num_devices,
            "examples_per_second": self.examples / seconds,
            "mfu": self.flops / seconds / peak_flops if peak_flops else None,
            "data_wait_seconds": spent["data"] / steps,
            "host_memory_gib": host_memory_gib()[0],
            "device_memory_gib": memory and memory[0],
            "device_memory_peak_gib_min": peaks and min(peaks),
            "device_memory_peak_gib_max": peaks and max(peaks),
        }
        if spent["rollout"]:
            figures["rollout_seconds"] = spent["rollout"] / steps
        self._begin(read)
        return figures
