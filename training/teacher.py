# SPDX-License-Identifier: Apache-2.0
"""A trained model that another learns from: what it is, whether it goes with the other, and its weights."""

import dataclasses
import pathlib
from collections.abc import Callable

import jax
from flax import nnx
from ml_collections import ConfigDict

from configs import loading
from configs.base import ConfigError
from training.checkpoints import Checkpoints
from training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A model that is learned from: its `model` section, itself without parameters, and these as shapes in layouts."""

    model: object
    graph: nnx.GraphDef
    params: dict

    def given_to(self, loss: Callable) -> Callable:
        """Return a loss that takes the teacher's parameters in place of the teacher."""
        return lambda *arguments: loss(*arguments[:-1], nnx.merge(self.graph, arguments[-1]))


def configuration(config: ConfigDict) -> ConfigDict:
    """Return the configuration of `distillation.teacher`: a run's folder, or a recipe, which has shapes alone.

    Raises:
      ConfigError: there is none, or its words or its longest sequence do not go with the student's.
    """
    name, teacher = config.distillation.teacher, _loaded(config.distillation.teacher)
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


def _loaded(name: str) -> ConfigDict:
    if name.endswith(".py"):
        return loading.load(name, "", {}).config
    folder = pathlib.Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"distillation.teacher={name} holds no run (no config.json there); name the folder of one")
    return loading.load_stored(folder, {}).config


def check_tokenizer(config: ConfigDict, tokenizer) -> None:
    """Raise ConfigError where the tokenizer of a corpus is not the teacher's.

    Args:
      tokenizer: of the corpus: `files` has the content of each of its files by name, none of bytes.
    """
    name, teacher = _loaded(config.distillation.teacher).data.tokenizer, config.distillation.teacher
    file = pathlib.Path(name)
    if name != "byte" and not file.is_file():
        raise ConfigError(
            f"distillation.teacher={teacher} has no tokenizer, by which it could read texts; name another"
        )
    same = not tokenizer.files if name == "byte" else tokenizer.files.get(file.name) == file.read_bytes()
    if not same:
        raise ConfigError(
            f"distillation.teacher={teacher} has another tokenizer than data.tokenizer={config.data.tokenizer}; "
            f"use data.tokenizer={name}"
        )


def check_trained(config: ConfigDict) -> None:
    """Raise ConfigError where the teacher has no weights, before a corpus is made and a folder begun."""
    name = config.distillation.teacher
    if name.endswith(".py"):
        raise ConfigError(
            f"distillation.teacher={name} is a recipe, without weights: that can be rehearsed, not trained"
        )
    with Checkpoints(pathlib.Path(name).expanduser()) as checkpoints:
        if not checkpoints.files.there():
            raise ConfigError(f"distillation.teacher={name} has no checkpoint; train it first, or name another run")


def restore(config: ConfigDict, abstract_params: dict) -> dict:
    """Return the parameters of the teacher's newest checkpoint that are evaluated, in the types and layouts asked for.

    Raises:
      CheckpointError: there is no good checkpoint.
    """
    averaged = configuration(config).optimizer.ema_decay > 0
    step, examples = (jax.ShapeDtypeStruct((), int) for _ in range(2))
    state = TrainState(step, examples, abstract_params, abstract_params if averaged else {}, (), {})
    with Checkpoints(pathlib.Path(config.distillation.teacher).expanduser()) as checkpoints:
        return checkpoints.restore_evaluated(checkpoints.newest_or_error(), state)
