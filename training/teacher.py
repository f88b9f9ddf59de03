# SPDX-License-Identifier: Apache-2.0
"""A trained model that another learns from, or is held against: what it is, and whether it goes with the other."""

from typing import NamedTuple

from flax import nnx
from ml_collections import ConfigDict

from configs.base import ConfigError
from training.other_run import OtherRun, initial


class Teacher(NamedTuple):
    """A model that is learned from: its `model` section, itself without parameters, and these as shapes in layouts."""

    model: object
    graph: nnx.GraphDef
    params: dict


def run_of(config: ConfigDict) -> OtherRun:
    """Return the run of what is frozen: the teacher's, or of a reference and beside adapters `train.init_from`."""
    if config.train.objective == "dpo" or config.lora.rank:
        return initial(config)
    return OtherRun("distillation.teacher", config.distillation.teacher)


def configuration(config: ConfigDict) -> ConfigDict:
    """Return the configuration of the teacher; of a reference it is the run's own.

    Raises ConfigError where there is none, or its words or its longest sequence do not go with the student's.
    """
    if config.train.objective == "dpo":
        reference = config.copy_and_resolve_references()
        reference.lora.rank, reference.model.dropout = 0, 0.0
        return reference
    name, teacher = config.distillation.teacher, run_of(config).configuration()
    if teacher.model.name != "decoder_lm":
        raise ConfigError(f"distillation.teacher={name} is a {teacher.model.name}; only a decoder_lm teaches")
    if teacher.model.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} differs from the {teacher.model.vocab_size} of "
            f"distillation.teacher={name}; use that, and its tokenizer"
        )
    if teacher.model.max_length < config.train.sequence_length:
        raise ConfigError(
            f"train.sequence_length={config.train.sequence_length} is longer than the {teacher.model.max_length} "
            f"tokens of distillation.teacher={name}; use at most that"
        )
    teacher.model.dropout = 0.0
    return teacher


def restore(config: ConfigDict, abstract_frozen: tuple, pin: dict | None = None) -> tuple:
    """Return the weights that steps take beside the run's own, in the layouts asked for; see training/other_run.py."""
    return tuple(run_of(config).restore(params, pin) for params in abstract_frozen)


def frozen_weights(run, record: dict | None) -> tuple[tuple[dict, ...], dict]:
    """Return what steps take beside state and batch, and which checkpoint of the other run that is, by its role.

    A run that goes on takes the same: the base of its adapters, the reference of its answers, one for both, or its
    teacher.
    """
    config = run.config
    needed = {
        "base": config.lora.rank > 0,
        "reference": config.train.objective == "dpo",
        "teacher": bool(config.distillation.teacher),
    }
    roles = [role for role in needed if needed[role]]
    pin = run_of(config).pin(record and record.get(roles[0])) if roles else None
    frozen = restore(config, run.abstract_frozen, pin)
    return frozen, dict.fromkeys(needed) | dict.fromkeys(roles, pin)
