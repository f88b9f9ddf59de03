# SPDX-License-Identifier: Apache-2.0
"""Finds the fewest microbatches that fit into a device's memory, by compiling the step for some of the divisors."""

import bisect
from collections.abc import Callable

from ml_collections import ConfigDict

from configs.base import batch_shards
from configs.errors import ConfigError
from settings import meta_learning, ramp
from settings.architecture import divisors, recompute_flags


def fit(config: ConfigDict, fits: Callable[[ConfigDict], bool]) -> None:
    """Set `train.gradient_accumulation` of a consistent configuration to the fewest microbatches that fit.

    Tries the fewest first, then bisects, since smaller microbatches need less memory. `fits` compiles the step of a
    configuration and returns whether it fits. Raises ConfigError if none fits, or if no candidate leaves two parts of
    the batch to measure the noise scale.
    """
    rows = config.train.global_batch // batch_shards(config.mesh)
    candidates = [of_count(config, count) for count in divisors(rows)]
    if ramp.measures_noise(config):
        candidates = [candidate for candidate in candidates if ramp.num_parts(candidate) > 1]
    candidates = [candidate for candidate in candidates if _leaves_rows(candidate)] or candidates[:1]
    if not candidates:
        raise ConfigError(
            f"batch.fit=auto: train.global_batch={config.train.global_batch} (of a ramp batch.first) has no two parts "
            "on a device, between which the noise scale is measured; raise it"
        )
    fewest = 0 if fits(candidates[0]) else bisect.bisect_left(candidates, True, lo=1, key=fits)
    if fewest == len(candidates):
        ways = " or ".join([*recompute_flags(config.model), "more devices that split the weights"])
        smallest = meta_learning.microbatch_rows(candidates[-1])
        least = "one sequence" if smallest == 1 else f"{smallest} sequences"
        raise ConfigError(
            f"batch.fit=auto: no microbatch of train.global_batch={config.train.global_batch} fits, not even of "
            f"{least} a device; try {ways}"
        )
    config.train.gradient_accumulation = candidates[fewest].train.gradient_accumulation
    config.batch.fit = "none"


def _leaves_rows(candidate: ConfigDict) -> bool:
    """Return whether the microbatches of the smallest batch have rows to measure hidden units on, if that is asked."""
    return meta_learning.leaves_rows(candidate, meta_learning.microbatch_rows(ramp.of_first_stage(candidate)))


def of_count(config: ConfigDict, num_microbatches: int) -> ConfigDict:
    """Return a copy of a configuration with this number of microbatches."""
    copy = config.copy_and_resolve_references()
    copy.train.gradient_accumulation, copy.batch.fit = num_microbatches, "none"
    return copy
