# SPDX-License-Identifier: Apache-2.0
"""Checks of the keys of reinforcement learning."""

from ml_collections import ConfigDict

from configs.errors import ConfigError
from settings.architecture import divisible
from settings.together import DRAWS, OF_ROLLOUTS


def check(config: ConfigDict) -> None:
    """Raise ConfigError for groups that do not fill a batch, and for answers that nothing rewards."""
    if config.train.objective not in DRAWS:
        return
    grpo, rows = config.grpo, config.train.global_batch
    divisible("train.global_batch", rows, "grpo.group_size", grpo.group_size)
    if grpo.reward == "task" and config.data.source not in OF_ROLLOUTS:
        raise ConfigError(
            f"grpo.reward=task knows the right answers of data.source={' and '.join(OF_ROLLOUTS)} alone, not of "
            f"{config.data.source}; use reference, or a function of your recipe, see docs/reasoning.md"
        )
