# SPDX-License-Identifier: Apache-2.0
"""Typed keys that nothing reads, since another key puts them out of force: told, for the run would be the same."""

from configs.base import ConfigError, get_config
from configs.loading import Loaded, flat

OUT_OF_FORCE = (  # a key, its value with which others are not read, and these
    ("model.num_experts", 0, (
        "model.experts_per_token", "model.shared_experts", "model.router", "model.gate_scale", "model.expert_capacity",
        "optimizer.bias_step", "train.balance_loss", "train.router_z_loss",
    )),
    ("model.experts_per_token", 1, ("model.gate_scale",)),
    ("distillation.teacher", "", (
        "distillation.divergence", "distillation.temperature", "distillation.soft_weight", "distillation.hard_weight",
        "distillation.hidden_weight",
    )),
    ("distillation.soft_weight", 0.0, ("distillation.divergence", "distillation.temperature")),
    ("train.objective", "language_modeling", ("preference.beta",)),
    ("lora.rank", 0, ("lora.alpha", "lora.targets")),
    ("batch.fit", "none", ("batch.memory_gib",)),
    ("batch.ramp", "none", ("batch.increase_step", "batch.increase_factor", "batch.learning_rate")),
)  # fmt: skip


def check(loaded: Loaded) -> None:
    """Raise ConfigError for the first typed key that is not read; what a recipe says, or a default, may stand."""
    values, defaults = flat(loaded.config), flat(get_config())
    for owner, idle, keys in OUT_OF_FORCE:
        for key in keys if values[owner] == idle else ():
            if key in loaded.typed and values[key] != defaults[key]:
                raise ConfigError(
                    f"{key}={values[key]} is not read with {owner}={idle or repr(idle)}; leave it out, or set {owner}"
                )
