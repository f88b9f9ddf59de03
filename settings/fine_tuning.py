# SPDX-License-Identifier: Apache-2.0
"""The weights that adapters may be trained for."""

from ml_collections import ConfigDict

from configs.errors import ConfigError, one_of

OF_ATTENTION, OF_MLP = ("query", "key", "value", "out"), ("gate", "up", "down")  # weights that adapters are for


def targets(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def check(config: ConfigDict) -> None:
    """Raise ConfigError if `lora.targets` names a weight that cannot have adapters, or names one twice."""
    if not config.lora.rank:
        return
    names, experts = targets(config.lora.targets), config.model.num_experts
    for name in names:
        one_of("lora.targets", name, (*OF_ATTENTION, *OF_MLP))
    if len(set(names)) < len(names):
        raise ConfigError(f"lora.targets={config.lora.targets} has a weight twice; name each once")
    if experts and set(names) & set(OF_MLP):
        raise ConfigError(
            f"lora.targets={config.lora.targets}: of model.num_experts={experts} none has adapters; "
            f"use some of {','.join(OF_ATTENTION)}"
        )
