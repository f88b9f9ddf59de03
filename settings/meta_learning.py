# SPDX-License-Identifier: Apache-2.0
"""Checks of meta-learning: the sizes of a task, and what has no second derivative, through which MAML trains."""

from ml_collections import ConfigDict

from configs.base import batch_shards
from configs.errors import ConfigError
from settings.architecture import multiples_text
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
    if meta.support >= length:
        raise ConfigError(
            f"meta.support={meta.support} leaves no query in the train.sequence_length={length} examples of a task; "
            f"use --config.meta.support={max(1, length // 2)}, or longer tasks"
        )
    if data.source == "glyphs" and meta.support % data.task_ways:
        raise ConfigError(
            f"meta.support={meta.support} is not a multiple of data.task_ways={data.task_ways}; "
            f"use {multiples_text(meta.support, data.task_ways)}"
        )
    if meta.loss == "cross_entropy" and meta.method != "prototypical" and config.model.output_dim < data.task_ways:
        raise ConfigError(
            f"model.output_dim={config.model.output_dim} is less than data.task_ways={data.task_ways}; "
            f"use --config.model.output_dim={data.task_ways}"
        )


def check_rows(config: ConfigDict) -> None:
    """Raise ConfigError if all rows of a device's microbatch are tasks, and hidden units are measured on the others."""
    share, plasticity = config.meta.share, config.plasticity
    measures = plasticity.method in OF_UNITS or plasticity.measure
    if config.train.objective != "meta_language_modeling" or not measures:
        return
    rows = config.train.global_batch // (batch_shards(config.mesh) * max(1, config.train.gradient_accumulation))
    if max(1, round(share * rows)) == rows:  # as objectives/meta_language_modeling.py counts them
        key = f"plasticity.method={plasticity.method}" if plasticity.method in OF_UNITS else "plasticity.measure"
        raise ConfigError(
            f"{key} measures hidden units on rows that are no tasks, and meta.share={share} leaves none of the {rows} "
            "of a device's microbatch; use a smaller share, or more rows"
        )
