# SPDX-License-Identifier: Apache-2.0
"""What a run begins with: the parameters of another, where `train.init_from` names one."""

from ml_collections import ConfigDict

from configs.base import ConfigError
from training.other_run import OtherRun

# Keys of `model` that weights do not depend on: how they are used, and how far positions reach, which may be extended.
FREE = (
    "dtype", "quantization", "attention", "layer_loop", "remat", "dropout", "expert_capacity", "max_length",
    "rope_theta", "rope_scaling", "rope_factor", "rope_original_length", "local_rope_theta",
)  # fmt: skip


def run_of(config: ConfigDict) -> OtherRun:
    """Return the run that `train.init_from` names."""
    return OtherRun("train.init_from", config.train.init_from)


def check(config: ConfigDict, tokenizer) -> None:
    """Raise ConfigError where `train.init_from` has no weights, or others or other words than a configuration.

    Args:
      tokenizer: of the corpus, see training/other_run.py; None: there is none.
    """
    source = run_of(config)
    source.folder()
    ours, theirs = (_with_head_dim(each.model) for each in (config, source.configuration()))
    for key, value in ours.items():
        if value != theirs[key] and key not in FREE:
            raise ConfigError(
                f"model.{key}={value} differs from the {theirs[key]} of train.init_from={source.name}; "
                f"use that, or all of its model by --config={source.name}"
            )
    if tokenizer:
        source.check_tokenizer(config, tokenizer)
    source.check_trained()


def _with_head_dim(model: ConfigDict) -> dict:
    return dict(model) | {"head_dim": model.head_dim or model.embed_dim // model.num_heads}
