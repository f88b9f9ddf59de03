# SPDX-License-Identifier: Apache-2.0
"""The one table of chip rates on which estimates of time are based, with sources."""

import dataclasses
import math

from configs.errors import ConfigError

NEEDED = {"hbm_gib", "peak_flops", "hbm_bandwidth", "link_bandwidth"}  # of any accelerator
OF_TPU = {"clock_hz", "dcn_bandwidth", "host_bandwidth"}
KERNEL_EFFICIENCY = 0.5
GPU_KERNEL_EFFICIENCY = 0.24  # measured on an H200, forward and backward (docs/decisions/layers.md)
DECODE_EFFICIENCY = 0.85


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """Rates of one chip: FLOP/s, bytes/s, and the clock in Hz that converts the compiler's cycles (TPU only)."""

    peak_flops: float
    memory_bandwidth: float
    ring_bandwidth: float
    permute_bandwidth: float
    clock_hz: float | None
    dcn_bandwidth: float | None = None
    host_bandwidth: float | None = None
    kernel_efficiency: float = KERNEL_EFFICIENCY
    decode_efficiency: float = DECODE_EFFICIENCY  # of the memory's bandwidth, by the kernel that reads a cache


def check(topology) -> None:
    """Raise ConfigError if a preset of configs/topologies.py lacks a figure that an estimate of time needs."""
    needed = {"tpu": NEEDED | OF_TPU, "gpu": NEEDED, "cpu": set()}[topology.accelerator]
    if missing := [name for name, value in vars(topology).items() if name in needed and not value]:
        raise ConfigError(
            f"{topology.name} lacks {', '.join(missing)} in configs/topologies.py: a rehearsal needs them"
        )


def of_topology(topology, measured_peak_flops: float | None = None) -> Assumptions:
    """Return the assumptions for a preset of configs/topologies.py.

    Args:
      measured_peak_flops: of this machine, if the topology is a CPU; its chips share it, and the speed of its memory
        is unknown.
    """
    if topology.accelerator == "cpu":
        return Assumptions(measured_peak_flops / topology.chips, math.inf, math.inf, math.inf, None)
    on_ring = 2 if topology.accelerator == "tpu" else 1
    return Assumptions(
        peak_flops=topology.peak_flops,
        memory_bandwidth=topology.hbm_bandwidth,
        ring_bandwidth=on_ring * topology.link_bandwidth,
        permute_bandwidth=topology.link_bandwidth,
        clock_hz=topology.clock_hz,
        dcn_bandwidth=topology.dcn_bandwidth,
        host_bandwidth=topology.host_bandwidth,
        kernel_efficiency=KERNEL_EFFICIENCY if topology.accelerator == "tpu" else GPU_KERNEL_EFFICIENCY,
    )


def table_of_decoding(topology) -> list[tuple[str, str, str]]:
    """Return the rows of `table` for a TPU that decodes; its attention kernel is another one."""
    given = of_topology(topology)
    kernel = (
        "kernels", f"{given.decode_efficiency:.0%} of main memory's bandwidth",
        "assumed; arXiv:2604.15464 reports up to 86% for such a kernel on TPU7x",
    )  # fmt: skip
    hops = "collectives", "no time for the hops themselves", "small sums take longer than their bytes"
    return [*(kernel if row[0] == kernel[0] else row for row in table(topology)), hops]


def table(topology) -> list[tuple[str, str, str]]:
    """Return rows of (what, value, source)."""
    if topology.accelerator == "cpu":
        return [("matrix products", "this machine's measured peak", "2048 x 2048 products, timed"),
                ("all else", "no time", "a lower bound")]  # fmt: skip
    given = of_topology(topology)
    rows = [
        ("peak", f"{given.peak_flops / 1e12:.0f} TFLOP/s bfloat16", "the chip's data sheet"),
        ("main memory", f"{given.memory_bandwidth / 1e9:.0f} GB/s", "the chip's data sheet"),
    ]
    if topology.accelerator == "gpu":
        return [
            *rows,
            ("collectives", f"{given.ring_bandwidth / 1e9:.0f} GB/s a chip", "the chip's data sheet, one direction"),
            ("attention kernels", f"{given.kernel_efficiency:.0%} of peak, causal", "measured on an H200"),
            ("all else", "the slower of FLOPs at peak and bytes at full bandwidth", "a roofline"),
        ]
    return [
        *rows,
        ("ring collectives", f"{given.ring_bandwidth / 1e9:.0f} GB/s a chip", "both directions of one ICI axis"),
        ("queues", "collectives of the same mesh axes wait for each other", "other sharing of links is ignored"),
        ("sums fused with a slice", "as a reduce-scatter: half an all-reduce", "the compiler's name for the program"),
        ("all-to-all", "n / 4 times its bytes over a ring of n", "the average distance of a part"),
        ("experts", "tokens are exchanged once and fill all slots", "balanced experts; half as many slots are spare"),
        ("between slices", f"{given.dcn_bandwidth / 1e9:.2f} GB/s a chip", "the host's network; v4 as v5p"),
        ("host's memory", f"{given.host_bandwidth / 1e9:.0f} GB/s a chip each way", "How to Scale Your Model, PCIe"),
        ("permutes", f"{given.permute_bandwidth / 1e9:.0f} GB/s a link", "one hop, one direction, queued"),
        ("cycles", f"{given.clock_hz / 1e9:.2f} GHz", "peak / (FLOPs a cycle of all matrix units)"),
        ("kernels", f"{given.kernel_efficiency:.0%} of peak; attention causal", "assumed; not known to the compiler"),
        ("all else", "the compiler's own estimated cycles", "libtpu, compiled here"),
    ]
