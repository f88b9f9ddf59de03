# SPDX-License-Identifier: Apache-2.0
"""Checks of the keys of reinforcement learning."""

from ml_collections import ConfigDict

from configs.errors import ConfigError
from settings.architecture import multiples_text


def check(config: ConfigDict) -> None:
    """Raise ConfigError for groups that do not fill a batch."""
    if config.train.objective != "grpo":
        return
    grpo, rows = config.grpo, config.train.global_batch
    if rows % grpo.group_size:
        raise ConfigError(
            f"train.global_batch={rows} is not a multiple of grpo.group_size={grpo.group_size}; "
            f"use {multiples_text(rows, grpo.group_size)}"
        )
