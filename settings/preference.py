# SPDX-License-Identifier: Apache-2.0
"""Checks that preference data is trained on with the objective for it."""

from ml_collections import ConfigDict

from configs.errors import ConfigError

SOURCE = "preferences"  # of data.source


def check_source(config: ConfigDict) -> None:
    """Raise ConfigError if preference data is given to an objective that would train on both answers alike."""
    if config.data.source == SOURCE and config.train.objective != "dpo":
        raise ConfigError(
            f"data.source={SOURCE} does not go with train.objective={config.train.objective}; "
            "use --config.train.objective=dpo"
        )
