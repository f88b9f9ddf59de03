# SPDX-License-Identifier: Apache-2.0
"""Fit the batch of a run into the memory of its devices, by compiling candidates."""

import math
from collections.abc import Callable

from cluster import processes
from configs.errors import ConfigError
from core.assembly import assemble
from reporting import preflight, throughput
from training import fit


def fit_batch(config, announce: Callable[[str], None]) -> None:
    """Apply `batch.fit`: set the smallest `train.gradient_accumulation` that fits in memory, or raise ConfigError."""
    if config.batch.fit == "none":
        return
    available = config.batch.memory_gib or throughput.device_capacity_gib()
    if available == math.inf:
        raise ConfigError("the devices do not report their memory, so batch.fit needs --config.batch.memory_gib")

    def fits(candidate) -> bool:
        count = candidate.train.gradient_accumulation
        needed = preflight.needed_gib(assemble(candidate).compile)
        verdict = "does not fit in" if needed == math.inf else f"needs {needed:.3g} of"
        announce(f"train.gradient_accumulation={count} {verdict} {available:.3g} GiB a device")
        return needed <= available

    fit.fit(config, fits)
    config.train.gradient_accumulation = max(processes.gather("microbatches", config.train.gradient_accumulation))
