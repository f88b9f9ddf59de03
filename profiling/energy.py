# SPDX-License-Identifier: Apache-2.0
"""The energy of a step: measured by NVML on NVIDIA GPUs, else estimated from the published power of a chip."""

import importlib.util
import os
from collections.abc import Iterable

POWER = {  # watts of a chip in production, idle and on average, and their source; no other chip has published ones
    "v4": (90, 170, "Jouppi et al. 2023, arXiv:2304.01433, table 4"),
}


def of_step(chip: str, num_chips: int, step_seconds: float, busy_share: float, tokens: int) -> dict | None:
    """Return joules of a step of all chips and of a token; None if the chip's power is not published.

    The power of a chip is assumed to rise linearly with its busy share, from the idle to the mean one. Memory, hosts,
    network and cooling are not in it.
    """
    if chip not in POWER:
        return None
    idle, mean, source = POWER[chip]
    joules = num_chips * (idle + (mean - idle) * busy_share) * step_seconds
    return _figures(True, joules, num_chips, step_seconds, tokens, source)


def measured(joules: float, num_chips: int, step_seconds: float, tokens: int) -> dict:
    """Return the same figures from the joules that all GPUs used in a step."""
    return _figures(False, joules, num_chips, step_seconds, tokens, "NVML, of the boards alone")


def _figures(estimate: bool, joules: float, num_chips: int, step_seconds: float, tokens: int, source: str) -> dict:
    return {
        "estimate": estimate, "watts_per_chip": joules / num_chips / step_seconds, "joules_per_step": joules,
        "joules_per_token": joules / tokens, "source": source,
    }  # fmt: skip


def nvml_joules(gpus: Iterable[int]) -> float | None:
    """Return the joules that GPUs have used since their driver was loaded; None if NVML cannot tell.

    `gpus` are their numbers among those that CUDA shows to this process.
    """
    if importlib.util.find_spec("pynvml") is None:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [_handle(pynvml, gpu) for gpu in gpus]
        return sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles)) / 1000
    except pynvml.NVMLError:  # no driver, or a GPU before Volta, which does not count
        return None


def _handle(pynvml, gpu: int):
    """Return NVML's handle of a GPU. CUDA numbers the GPUs of CUDA_VISIBLE_DEVICES, and NVML all GPUs of the host."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = visible.split(",")[gpu].strip() if visible else str(gpu)
    by_number, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
    return by_number(int(name)) if name.isdecimal() else by_uuid(name)
