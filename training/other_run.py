# SPDX-License-Identifier: Apache-2.0
"""Another run that this one builds on: what it is, whether its words are ours, and its weights."""

import dataclasses

import jax
from ml_collections import ConfigDict

from configs import loading
from configs.base import ConfigError
from training.bucket import path_of
from training.checkpoints import Checkpoints
from training.state import TrainState


@dataclasses.dataclass(frozen=True)
class OtherRun:
    """The folder of a run, here or in a bucket, or a recipe, which has shapes alone; `key` is where it is named."""

    key: str
    name: str

    def configuration(self) -> ConfigDict:
        """Return its configuration; ConfigError where there is none."""
        if self.name.endswith(".py"):
            return loading.load(self.name, "", {}).config
        return loading.load_stored(self.folder(), {}).config

    def folder(self):
        """Return its folder; ConfigError where it is a recipe, which has no weights."""
        if self.name.endswith(".py"):
            raise ConfigError(
                f"{self.key}={self.name} is a recipe, without weights: that can be rehearsed, not trained"
            )
        return loading.run_folder(self.key, self.name, path_of)

    def check_tokenizer(self, config: ConfigDict, tokenizer) -> None:
        """Raise ConfigError where the tokenizer of a corpus is not this run's.

        Args:
          config: of the run that has the corpus.
          tokenizer: of the corpus: `files` has the content of each of its files by name, none of bytes.
        """
        file = path_of(self.configuration().data.tokenizer)
        theirs = {file.name: file.read_bytes()} if file.is_file() else {}
        if tokenizer.files.get(file.name) != theirs.get(file.name) or bool(tokenizer.files) != bool(theirs):
            raise ConfigError(
                f"{self.key}={self.name} has another tokenizer than data.tokenizer={config.data.tokenizer}; "
                f"use data.tokenizer={file if theirs else 'byte'}"
            )

    def restore(self, abstract_params: dict) -> dict:
        """Return the parameters of its newest checkpoint that are evaluated, in the types and layouts asked for.

        Raises:
          ConfigError: it has none.
          CheckpointError: there is no good checkpoint.
        """
        with Checkpoints(self.folder()) as checkpoints:
            newest = checkpoints.newest_or_error()
            averaged = checkpoints.record(newest)["config"]["optimizer.ema_decay"] > 0
            step, examples = (jax.ShapeDtypeStruct((), int) for _ in range(2))
            state = TrainState(step, examples, abstract_params, abstract_params if averaged else {}, (), {})
            return checkpoints.restore_evaluated(newest, state)
