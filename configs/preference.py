# SPDX-License-Identifier: Apache-2.0
"""What a run that learns from preferences needs, and what it does not read."""

from ml_collections import ConfigDict

from configs.base import ConfigError

SOURCE = "preferences"  # of data.source
NOT_READ = ("train.z_loss", "train.balance_loss", "train.router_z_loss")  # parts of another loss


def check(config: ConfigDict) -> None:
    """Raise ConfigError where `train.objective=dpo` lacks its reference or its data, or has a loss of others."""
    train = config.train
    if train.objective != "dpo":
        return
    if not train.init_from:
        raise ConfigError("train.objective=dpo needs train.init_from, the folder of a run: it begins there, held to it")
    if config.data.source != SOURCE:
        raise ConfigError(
            f"train.objective=dpo does not go with data.source={config.data.source}; use data.source={SOURCE}"
        )
    for key in NOT_READ:
        if value := train[key.partition(".")[2]]:
            raise ConfigError(f"{key}={value} is not read by train.objective=dpo; leave it out")


def check_source(config: ConfigDict) -> None:
    """Raise ConfigError where answers, of which only one is to be learned, would be learned alike."""
    if config.data.source == SOURCE and config.train.objective != "dpo":
        raise ConfigError(
            f"data.source={SOURCE} does not go with train.objective={config.train.objective}; use train.objective=dpo"
        )
