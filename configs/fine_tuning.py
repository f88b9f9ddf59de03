# SPDX-License-Identifier: Apache-2.0
"""What a run that begins with the weights of another may be."""

from ml_collections import ConfigDict

from configs.base import ConfigError


def check(config: ConfigDict) -> None:
    """Raise ConfigError where `train.init_from` does not go with the rest of a configuration."""
    source, model = config.train.init_from, config.model
    if source and model.name != "decoder_lm":
        raise ConfigError(f"train.init_from={source} does not go with model.name={model.name}; only a decoder_lm does")
    if source and config.train.objective == "distillation" and config.distillation.hidden_weight:
        raise ConfigError(
            f"distillation.hidden_weight={config.distillation.hidden_weight} must be 0 with train.init_from, whose run "
            "has no projection to the teacher's width"
        )
