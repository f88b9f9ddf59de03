# SPDX-License-Identifier: Apache-2.0
"""The frozen model of an objective, a teacher or a reference: its configuration, its weights, and checks of both."""

from typing import NamedTuple

from flax import nnx
from ml_collections import ConfigDict

from checkpointing.source_run import SourceRun, initial
from configs.errors import ConfigError


class Teacher(NamedTuple):
    """A frozen model: its `model` section, its graph, and its abstract parameters with shardings."""

    model: object
    graph: nnx.GraphDef
    params: dict


def run_of(config: ConfigDict) -> SourceRun:
    """Return the run of the frozen weights: the teacher's; for a reference or adapters, that of `train.init_from`."""
    if config.train.objective == "dpo" or config.lora.rank:
        return initial(config)
    return SourceRun("distillation.teacher", config.distillation.teacher)


def configuration(config: ConfigDict) -> ConfigDict:
    """Return the configuration of the teacher; that of a reference is the run's own.

    Raises ConfigError if it is missing, or if its vocabulary or maximum length does not fit the student.
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


def restore(config: ConfigDict, abstract_frozen: tuple, ref: dict | None = None) -> tuple:
    """Restore the frozen weights in the types and shardings of `abstract_frozen`; see checkpointing/source_run.py."""
    return tuple(run_of(config).restore(params, ref) for params in abstract_frozen)


def frozen_weights(run, record: dict | None) -> tuple[tuple[dict, ...], dict]:
    """Return the frozen weights of a step, and the reference of their checkpoint by role.

    The roles are the base of adapters, the reference of DPO, and the teacher. Base and reference are the same
    checkpoint. A resumed run takes the checkpoint of its record.
    """
    config = run.config
    needed = {
        "base": config.lora.rank > 0,
        "reference": config.train.objective == "dpo",
        "teacher": bool(config.distillation.teacher),
    }
    roles = [role for role in needed if needed[role]]
    ref = run_of(config).checkpoint_ref(record and record.get(roles[0])) if roles else None
    frozen = restore(config, run.abstract_frozen, ref)
    return frozen, dict.fromkeys(needed) | dict.fromkeys(roles, ref)
