# SPDX-License-Identifier: Apache-2.0
"""Checks of meta-learning: the sizes of a task, and what has no second derivative, through which MAML trains."""

import math

from ml_collections import ConfigDict

from configs.base import batch_shards
from configs.errors import ConfigError
from settings.architecture import divisible
from settings.together import META, OF_UNITS

TWICE_DIFFERENTIABLE = {  # a key of the model, the value that MAML needs, and why
    "attention": ("reference", "fused kernels have no second derivative"),
    "quantization": ("none", "rounded products have no second derivative"),
}


def check(config: ConfigDict) -> None:
    """Raise ConfigError if MAML cannot differentiate, or a task has no query or classes of unequal support."""
    if config.train.objective in META and config.meta.method == "maml":
        for key, (needed, why) in TWICE_DIFFERENTIABLE.items():
            if config.model[key] != needed:
                raise ConfigError(f"meta.method=maml needs model.{key}={needed}, not {config.model[key]} ({why})")
    if config.train.objective == "meta_learning":
        _check_sizes(config)


def _check_sizes(config: ConfigDict) -> None:
    meta, data, length = config.meta, config.data, config.train.sequence_length
    ways = data.task_ways if data.source == "glyphs" else 1
    fits = length // 2 // ways * ways  # about half of a task
    if meta.support >= length:
        raise ConfigError(
            f"meta.support={meta.support} leaves no query in the train.sequence_length={length} examples of a task; "
            f"use {f'--config.meta.support={fits}, or ' if fits else ''}longer tasks"
        )
    if data.source == "glyphs":
        divisible("meta.support", meta.support, "data.task_ways", data.task_ways)
    if meta.loss == "cross_entropy" and meta.method != "prototypical" and config.model.output_dim < data.task_ways:
        raise ConfigError(
            f"model.output_dim={config.model.output_dim} is less than data.task_ways={data.task_ways}; "
            f"use --config.model.output_dim={data.task_ways}"
        )


def task_rows(share: float, rows: int) -> int:
    """Return how many rows of a device's microbatch are tasks, as objectives/meta_language_modeling.py counts them."""
    return max(1, round(share * rows))


def microbatch_rows(config: ConfigDict, num_microbatches: int = 0) -> int:
    """Return the rows of a device's microbatch, on a resolved mesh; by default there are as many as the key says."""
    num_microbatches = num_microbatches or max(1, config.train.gradient_accumulation)
    return max(1, config.train.global_batch // (batch_shards(config.mesh) * num_microbatches))


def share_note(config: ConfigDict, num_microbatches: int) -> str:
    """Return a line about the share of rows that are tasks, if it is not that of `meta.share`; else ""."""
    rows = microbatch_rows(config, num_microbatches)
    count = task_rows(config.meta.share, rows)
    if config.train.objective != "meta_language_modeling" or math.isclose(count / rows, config.meta.share):
        return ""
    return (
        f"Note: {count} of the {rows} rows of a device's microbatch are tasks, {count / rows:.0%} in place of "
        f"meta.share={config.meta.share:g}; more rows come closer"
    )


def leaves_rows(config: ConfigDict, rows: int) -> bool:
    """Return whether microbatches of `rows` on a device have rows to measure hidden units on, if that is asked."""
    measures = config.plasticity.method in OF_UNITS or config.plasticity.measure
    is_of_tasks = config.train.objective == "meta_language_modeling"
    return not (is_of_tasks and measures) or task_rows(config.meta.share, rows) < rows


def check_rows(config: ConfigDict, rows: int) -> None:
    """Raise ConfigError if all `rows` of a device's microbatch are tasks, and hidden units are measured on others."""
    share, plasticity = config.meta.share, config.plasticity
    if not leaves_rows(config, rows):
        key = f"plasticity.method={plasticity.method}" if plasticity.method in OF_UNITS else "plasticity.measure"
        raise ConfigError(
            f"{key} measures hidden units on rows that are not tasks, and meta.share={share} leaves none of the {rows} "
            "of a device's microbatch; use a smaller share, or more rows"
        )
