# SPDX-License-Identifier: Apache-2.0
"""What must be consistent where held-out sequences are computed a part at a time."""

from ml_collections import ConfigDict

from configs.base import ConfigError


def check(config: ConfigDict) -> None:
    """Raise ConfigError for parts of a sequence that are none, or whose losses would not be those of the whole."""
    chunk, length, mesh = config.evaluation.chunk_tokens, config.train.sequence_length, config.mesh
    if not chunk:
        return
    said = f"evaluation.chunk_tokens={chunk}"
    if config.train.objective == "recursive":
        raise ConfigError(f"{said} is of language models, model.name={config.model.name} is none; use 0")
    if config.train.objective == "dpo":
        raise ConfigError(f"{said} does not go with train.objective=dpo, which compares whole answers; use 0")
    if length % chunk:
        parts = -(-length // chunk)
        fitting = next(n for n in range(parts, length + 1) if length % n == 0)
        raise ConfigError(f"{said} does not divide train.sequence_length={length}; use {length // fitting}")
    if chunk % mesh.context:
        raise ConfigError(f"{said} is not a multiple of mesh.context={mesh.context}; use {mesh.context * chunk}")
    if config.model.expert_capacity:
        raise ConfigError(
            f"{said} does not go with model.expert_capacity={config.model.expert_capacity}: which tokens are dropped "
            "depends on those beside them; use 0 for one of them"
        )
