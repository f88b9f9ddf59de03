# SPDX-License-Identifier: Apache-2.0
"""Checks of the keys of reinforcement learning."""

import pathlib

from ml_collections import ConfigDict

from configs.errors import ConfigError
from settings.architecture import multiples_text


def check(config: ConfigDict) -> None:
    """Raise ConfigError for groups that do not fill a batch, or for a reward that is none."""
    if config.train.objective != "grpo":
        return
    grpo, rows = config.grpo, config.train.global_batch
    if rows % grpo.group_size:
        raise ConfigError(
            f"train.global_batch={rows} is not a multiple of grpo.group_size={grpo.group_size}; "
            f"use {multiples_text(rows, grpo.group_size)}"
        )
    file, _, function = grpo.reward.partition(":")
    if grpo.reward not in ("task", "random") and not (pathlib.Path(file).expanduser().is_file() and function):
        raise ConfigError(
            f"grpo.reward={grpo.reward} is not task, random, or FILE.py:FUNCTION with a file that exists "
            f"(current folder: {pathlib.Path.cwd()})"
        )
