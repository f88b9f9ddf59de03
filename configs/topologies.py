# SPDX-License-Identifier: Apache-2.0
"""Hardware presets: the chips, hosts, speeds and default mesh of a slice.

TPU v4-N and v5p-N count TensorCores, two per chip; v5e-N and v6e-N count chips. Sources of compute, memory and links
are the "System architecture" pages of the Cloud TPU documentation (v4, v5e, v5p, v6e) and NVIDIA's H100 and H200 data
sheets (dense bfloat16, int8 and fp8). The bandwidth to the host's memory is from jax-ml.github.io/scaling-book/tpus:
15 GB/s for TPUs, and 32 GB/s for v6e. A CPU has no peak here; reporting/throughput.py measures it.
"""

import dataclasses
import os
import re
from importlib import metadata

from configs.errors import ConfigError, one_of

SEVERAL = re.compile(r"(?P<count>[2-9]|[1-9][0-9]{1,2})x(?P<slice>v\d.*)")  # fewer than 1,000 slices
PRICES_AS_OF = "2025-11"  # on-demand list prices in US regions, dollars per chip-hour; None: unknown
# Since jaxlib 0.11.1, XLA has a pipelining mode for each collective instead of a boolean option.
if tuple(map(int, re.findall(r"\d+", metadata.version("jaxlib"))[:3])) < (0, 11, 1):
    PIPELINE, ON = "xla_gpu_enable_pipelined_", True
else:
    PIPELINE, ON = "xla_gpu_pipeline_", "COLLECTIVE_PIPELINING_MODE_ON"
COMPILER_OPTIONS = {  # by accelerator, without options that the compiler enables by default
    "cpu": {},
    # Recommended by NVIDIA. Each option changes a program for eight H100s; neither was measured. The latency-hiding
    # scheduler, their first recommendation, is on by default: its option does not change programs.
    "gpu": {
        PIPELINE + "all_gather": ON,  # in a scan, all-gather a layer's weights while the previous layer computes
        PIPELINE + "all_reduce": ON,  # and all-reduce its sums while the following layer computes
    },
    "tpu": {
        "xla_enable_async_all_gather": "true",  # overlaps with matrix products
        # Never split matrix products into rings of collective permutes: XLA's schedules are slower, on v5p equal.
        "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
    },
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """One slice, or several. FLOP/s are dense bfloat16 per chip; bandwidths per chip in bytes/s; GiB are 2^30 bytes."""

    name: str
    chip: str  # of CHIPS
    accelerator: str  # cpu, tpu, gpu
    chips: int
    hosts: int = 1
    hbm_gib: float | None = None
    peak_flops: float | None = None
    hbm_bandwidth: float | None = None
    link_bandwidth: float | None = None  # one link, one direction
    clock_hz: float | None = None  # of the matrix units: peak / (2 * units * their side squared)
    dcn_bandwidth: float | None = None  # a chip's share of its host's network, to other slices
    host_bandwidth: float | None = None  # to the host's memory, and as much from it at the same time
    host_gib: float | None = None  # memory of a host
    compiler_name: str = ""  # the TPU compiler's name of the slice
    slices: int = 1  # joined by the data-centre network
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)
    price_per_chip_hour: float | None = None
    faster: tuple[str, ...] = ()  # values of model.quantization that it multiplies faster than bfloat16
    cores_per_chip: int = 1  # TensorCores; JAX shows a chip as one device
    gke_name: str = ""  # of the chip, as a node's label has it

    @property
    def chips_per_host(self) -> int:
        return self.chips // self.hosts

    @property
    def capacity_gib(self) -> float:
        """Memory for the arrays of a device: jax takes 75 % of a GPU's, and CPU devices share this machine's."""
        if self.accelerator == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 / self.chips
        return self.hbm_gib * (_share_of_gpu() if self.accelerator == "gpu" else 1)


CHIPS = {
    "v4": dict(accelerator="tpu", hbm_gib=32, peak_flops=275e12, hbm_bandwidth=1228e9,
               link_bandwidth=45e9, dcn_bandwidth=6.25e9, host_bandwidth=15e9, clock_hz=1.05e9,
               price_per_chip_hour=3.22, cores_per_chip=2, gke_name="tpu-v4-podslice"),
    "v5e": dict(accelerator="tpu", hbm_gib=16, peak_flops=197e12, hbm_bandwidth=819e9,
                link_bandwidth=45e9, dcn_bandwidth=3.125e9, host_bandwidth=15e9, clock_hz=1.5e9,
                faster=("int8",), price_per_chip_hour=1.20, gke_name="tpu-v5-lite-podslice"),
    "v5p": dict(accelerator="tpu", hbm_gib=95, peak_flops=459e12, hbm_bandwidth=2765e9,
                link_bandwidth=90e9, dcn_bandwidth=6.25e9, host_bandwidth=15e9, clock_hz=1.75e9,
                faster=("int8",), price_per_chip_hour=4.20, cores_per_chip=2, gke_name="tpu-v5p-slice"),
    "v6e": dict(accelerator="tpu", hbm_gib=32, peak_flops=918e12, hbm_bandwidth=1640e9,
                link_bandwidth=90e9, dcn_bandwidth=12.5e9, host_bandwidth=32e9, clock_hz=1.75e9,
                faster=("int8",), price_per_chip_hour=2.70, gke_name="tpu-v6e-slice"),
    "h100": dict(accelerator="gpu", hbm_gib=79.6, peak_flops=989e12, hbm_bandwidth=3350e9,
                 link_bandwidth=450e9, faster=("int8", "fp8"), price_per_chip_hour=3.93),
    "h200": dict(accelerator="gpu", hbm_gib=140.4, peak_flops=989e12, hbm_bandwidth=4800e9,
                 link_bandwidth=450e9, faster=("int8", "fp8")),
    "cpu": dict(accelerator="cpu"),
}  # fmt: skip

CHIP_OF_KIND = {  # by what JAX calls a device; H100s with other memory have other peaks
    "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200",
}  # fmt: skip

# Memory of Google's machine types ct4p-hightpu-4t, ct5lp-hightpu-1t, -4t and -8t, ct5p-hightpu-4t, ct6e-standard-1t,
# -4t and -8t, by chip and chips of a host.
HOST_GIB = {
    ("v4", 4): 407, ("v5e", 1): 48, ("v5e", 4): 192, ("v5e", 8): 384, ("v5p", 4): 448,
    ("v6e", 1): 176, ("v6e", 4): 720, ("v6e", 8): 1440,
}  # fmt: skip

SLICES = {  # name: (chip, chips, hosts, the compiler's name); the default mesh is all chips on fsdp
    "cpu": ("cpu", 1, 1, ""),
    "cpu-8": ("cpu", 8, 1, ""),
    "v4-8": ("v4", 4, 1, "v4:2x2x1"),
    "v4-16": ("v4", 8, 2, "v4:2x2x2"),
    "v4-32": ("v4", 16, 4, "v4:2x2x4"),
    "v4-64": ("v4", 32, 8, "v4:2x4x4"),
    "v4-128": ("v4", 64, 16, "v4:4x4x4"),
    "v5e-1": ("v5e", 1, 1, "v5e:1x1"),
    "v5e-4": ("v5e", 4, 1, "v5e:2x2"),
    "v5e-8": ("v5e", 8, 1, "v5e:2x4"),
    "v5e-16": ("v5e", 16, 4, "v5e:4x4"),
    "v5p-8": ("v5p", 4, 1, "v5p:2x2x1"),
    "v5p-32": ("v5p", 16, 4, "v5p:2x2x4"),
    "v5p-128": ("v5p", 64, 16, "v5p:4x4x4"),
    "v6e-1": ("v6e", 1, 1, "v6e:1x1"),
    "v6e-4": ("v6e", 4, 1, "v6e:2x2"),
    "v6e-8": ("v6e", 8, 1, "v6e:2x4"),
    "h100-8": ("h100", 8, 1, ""),
    "h200-1": ("h200", 1, 1, ""),
}


def _share_of_gpu() -> float:
    """Return the share of a GPU's memory that jax takes for arrays; ConfigError if its variable is not a number."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):  # the second is the older name
        try:
            if given := os.environ.get(name):
                return float(given)
        except ValueError:
            raise ConfigError(f"{name}={given} is not a number; write {name}=0.9 for 90 %") from None
    return 0.75


def get(name: str, flag: str = "--topology") -> Topology:
    """Return the preset called `name`; for TPUs, also several slices, such as 2xv4-32.

    Raises:
      ConfigError: there is none; the message has the flag that named it, and the nearest.
    """
    if (several := SEVERAL.fullmatch(name)) and several["slice"] in SLICES:
        one, count = get(several["slice"], flag), int(several["count"])
        return dataclasses.replace(
            one, name=name, slices=count, chips=count * one.chips, hosts=count * one.hosts,
            mesh={"dcn_data": count} | one.mesh,
        )  # fmt: skip
    one_of(flag, name, SLICES)
    chip, chips, hosts, compiler_name = SLICES[name]
    if chip not in CHIPS or chips % hosts:
        rule = "hosts share their chips equally, and CHIPS has the chip"
        raise ConfigError(f"SLICES: {name} has {chips} {chip} chips on {hosts} hosts, but {rule}")
    return Topology(
        name=name, chip=chip, chips=chips, hosts=hosts, compiler_name=compiler_name, mesh={"fsdp": chips},
        host_gib=HOST_GIB.get((chip, chips // hosts)), **CHIPS[chip],
    )  # fmt: skip


def one_chip(kind: str) -> Topology | None:
    """Return a topology of one chip, from what JAX calls it (`device_kind`); None if it is not in CHIPS."""
    chip = CHIP_OF_KIND.get(kind)
    return chip and Topology(name=chip, chip=chip, chips=1, **CHIPS[chip])


def of_size(like: Topology, chips: int) -> str:
    """Return the name of the preset with `chips` chips of the same kind as `like`; "" if there is none."""
    return next((name for name, (chip, count, *_) in SLICES.items() if (chip, count) == (like.chip, chips)), "")
