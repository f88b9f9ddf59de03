# SPDX-License-Identifier: Apache-2.0
"""Rules of the objective "error_correction" that depend on several keys."""

from ml_collections import ConfigDict

from configs.errors import ConfigError


def check(config: ConfigDict) -> None:
    """Raise ConfigError if a frozen model has no weights, or if weights are given that a joint training cannot take."""
    keys, begins = config.error_correction, config.train.init_from
    if config.train.objective != "error_correction":
        return
    if not begins and not keys.joint_weight:
        raise ConfigError(
            "train.objective=error_correction needs train.init_from, the folder of the run whose drafts are corrected; "
            "or error_correction.joint_weight, to train both from random weights"
        )
    if begins and keys.joint_weight:
        raise ConfigError(
            f"error_correction.joint_weight={keys.joint_weight} trains the model from random weights; "
            "empty train.init_from, or leave the weight out to keep that model frozen"
        )
    if round(config.train.sequence_length * keys.rate) < 1:
        raise ConfigError(
            f"error_correction.rate={keys.rate} replaces no token of train.sequence_length="
            f"{config.train.sequence_length}; raise one of them"
        )
