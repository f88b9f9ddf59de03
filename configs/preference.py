# SPDX-License-Identifier: Apache-2.0
"""What preferences are learned by."""

from ml_collections import ConfigDict

from configs.base import ConfigError

SOURCE = "preferences"  # of data.source


def check_source(config: ConfigDict) -> None:
    """Raise ConfigError where answers, of which only one is to be learned, would be learned alike."""
    if config.data.source == SOURCE and config.train.objective != "dpo":
        raise ConfigError(
            f"data.source={SOURCE} does not go with train.objective={config.train.objective}; "
            "use --config.train.objective=dpo"
        )
