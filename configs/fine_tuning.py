# SPDX-License-Identifier: Apache-2.0
"""What a run that begins with the weights of another may be, and what adapters of them."""

from ml_collections import ConfigDict

from configs.base import ConfigError
from configs.loading import one_of

OF_ATTENTION, OF_MLP = ("query", "key", "value", "out"), ("gate", "up", "down")  # weights that adapters are for


def targets(text: str) -> tuple[str, ...]:
    """Return the names in `lora.targets`."""
    return tuple(name.strip() for name in text.split(","))


def check(config: ConfigDict) -> None:
    """Raise ConfigError where `train.init_from` or `lora` do not go with the rest of a configuration."""
    source, model = config.train.init_from, config.model
    if source and model.name != "decoder_lm":
        raise ConfigError(f"train.init_from={source} does not go with model.name={model.name}; only a decoder_lm does")
    if source and config.train.objective == "distillation" and config.distillation.hidden_weight:
        raise ConfigError(
            f"distillation.hidden_weight={config.distillation.hidden_weight} must be 0 with train.init_from, whose run "
            "has no projection to the teacher's width"
        )
    if config.lora.rank:
        _check_adapters(config)


def _check_adapters(config: ConfigDict) -> None:
    names, rank = targets(config.lora.targets), config.lora.rank
    if not config.train.init_from:
        raise ConfigError(f"lora.rank={rank} needs train.init_from, the folder of the run whose weights are adapted")
    for name in names:
        one_of("lora.targets", name, (*OF_ATTENTION, *OF_MLP))
    if len(set(names)) < len(names):
        raise ConfigError(f"lora.targets={config.lora.targets} has a weight twice; name each once")
    experts = config.model.num_experts
    if experts and set(names) & set(OF_MLP):
        raise ConfigError(
            f"lora.targets={config.lora.targets}: of model.num_experts={experts} none has adapters; "
            f"use some of {','.join(OF_ATTENTION)}"
        )
    if config.train.objective == "distillation":
        raise ConfigError(f"lora.rank={rank} does not go with a teacher; use train.init_from alone, or lora.rank=0")
    if config.model.quantization != "none":
        raise ConfigError(f"lora.rank={rank} does not go with model.quantization={config.model.quantization}; use none")
