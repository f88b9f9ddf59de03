# SPDX-License-Identifier: Apache-2.0
"""Checks that preference data is trained on with the objective for it."""

from ml_collections import ConfigDict

from configs.errors import ConfigError
from settings.together import OBJECTIVES

SOURCE = "preferences"  # of data.source


def to_evaluate(config: ConfigDict) -> None:
    """Evaluate preference data with the objective that trains on them; ConfigError without a model to compare with.

    An objective that was added to ours stays.
    """
    if config.data.source != SOURCE or config.train.objective not in OBJECTIVES:
        return
    if not config.train.init_from:
        raise ConfigError(
            f"data.source={SOURCE} compares a run with the model that it began from, and this one began from random "
            "weights; name a run of train.objective=dpo"
        )
    config.train.objective = "dpo"  # a stored configuration is loaded as a language model


def check_source(config: ConfigDict) -> None:
    """Raise ConfigError if preference data is given to one of our objectives that would train on both answers alike."""
    objective = config.train.objective
    if config.data.source == SOURCE and objective in OBJECTIVES and objective != "dpo":
        raise ConfigError(
            f"data.source={SOURCE} does not go with train.objective={objective}; use --config.train.objective=dpo"
        )
