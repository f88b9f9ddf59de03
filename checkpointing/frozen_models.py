# SPDX-License-Identifier: Apache-2.0
"""The frozen models of a run: their configurations, the runs that their weights come from, and their weights.

Roles are those of the objective, such as "teacher", and "base" for the frozen parameters of the trained model itself.
"""

from ml_collections import ConfigDict

from checkpointing.record import frozen_refs
from checkpointing.source_run import SourceRun, initial
from configs.errors import ConfigError
from objectives.objective import FrozenModel, Objective
from settings import stored_config
from settings.keys import flat


def source_of(model: FrozenModel, config: ConfigDict) -> SourceRun:
    """Return the run of a frozen model's weights."""
    return SourceRun(model.key, flat(config)[model.key])


def sources(objective: Objective, config: ConfigDict) -> dict[str, SourceRun]:
    """Return the run of the weights of each role."""
    return {model.role: source_of(model, config) for model in objective.frozen_models()} | {"base": initial(config)}


def configuration_of(model: FrozenModel, config: ConfigDict) -> ConfigDict:
    """Return the configuration of a frozen model, without dropout.

    The model of `train.init_from` is the run's own, without adapters. Raises ConfigError if the run of another one is
    missing, or if its vocabulary or maximum length does not fit the trained model.
    """
    if model.key == "train.init_from":
        own = config.copy_and_resolve_references()
        stored_config.drop_other_models(own)
        own.model.dropout = 0.0
        return own
    source = source_of(model, config)
    found, name = source.configuration(), f"{model.key}={source.name}"
    if found.model.name != config.model.name:
        raise ConfigError(
            f"{name} is a {found.model.name}, but the run trains a {config.model.name}; name one of those"
        )
    if found.model.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} differs from the {found.model.vocab_size} of {name}; "
            "use that, and its tokenizer"
        )
    if found.model.max_length < config.train.sequence_length:
        raise ConfigError(
            f"train.sequence_length={config.train.sequence_length} is longer than the {found.model.max_length} tokens "
            f"of {name}; use at most that"
        )
    found.model.dropout = found.model.expert_capacity = 0.0  # what it teaches does not depend on the batch
    return found


def references(run, record: dict | None) -> dict[str, dict]:
    """Return the reference of the checkpoint of each role's weights; a resumed run takes those of its record.

    A role that the record does not have takes the checkpoint that another role of its source has there: the reference
    of an evaluation on preferences is the base of the adapters that it evaluates.

    Raises ConfigError for a run without a folder, and CheckpointError if a checkpoint is missing or has changed.
    """
    by_source, by_role = {}, sources(run.objective, run.config)
    known = {by_role[role]: ref for role, ref in frozen_refs(record or {}).items() if role in by_role}
    for role in run.abstract_frozen:
        source = by_role[role]
        if source not in by_source:
            by_source[source] = source.checkpoint_ref(known.get(source))
    return {role: by_source[by_role[role]] for role in run.abstract_frozen}


def weights(run, refs: dict[str, dict]) -> dict[str, dict]:
    """Return the frozen weights of a run by role, from the checkpoints of `references`.

    They are restored in the types and shardings of `run.abstract_frozen`; roles with the same ones share them.
    """
    by_role, found = sources(run.objective, run.config), {}
    for role, abstract in run.abstract_frozen.items():
        alike = (other for other in found if by_role[other] == by_role[role] and run.abstract_frozen[other] == abstract)
        same = next(alike, None)
        found[role] = found[same] if same else by_role[role].restore(abstract, refs[role])
    return found
