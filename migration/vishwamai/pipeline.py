# SPDX-License-Identifier: Apache-2.0
"""VishwamAIPipeline: a configuration, the folder of its run, and text from the model that was trained there."""

import pathlib
from collections.abc import Mapping, Sequence

from configs.errors import ConfigError
from migration.vishwamai import keys
from settings import stored_config, validation

FOLDER = "runs/vishwamai"


class VishwamAIPipeline:
    """A model: `config` of Torus, the `given` dotted keys, and `workdir`, the folder of its run: `checkpoint_dir`."""

    def __init__(self, config: Mapping):
        """Raises ConfigError: a key is unknown or not supported, or a value is inconsistent."""
        self.given, self.config = keys.dotted(config), keys.recipe(config)
        self.workdir = pathlib.Path(str(self.given.get(keys.FOLDER, FOLDER))).expanduser()

    def generate(
        self, prompts: Sequence[str], *, use_tot: bool | None = None, use_error_correction: bool | None = None,
        seed: int = 0, **how,
    ) -> list[str]:  # fmt: skip
        """Return each prompt with its continuation by the newest checkpoint; `how` is as in TrainedRun.generate.

        Args:
          use_tot: search instead: each prompt is a problem of the task that the model was trained on. Return the
            answers, "" where none was found. Default: the configuration's.
          use_error_correction: revise what was drawn. Default: the configuration's.

        Raises:
          ConfigError: there is no run, or it was not trained for what is asked.
        """
        from core import solving
        from core.evaluators import engine_of
        from parallelism.mesh import mesh_context
        from trained_run import TrainedRun

        loaded = stored_config.load_to_read(self.workdir, {})
        config, own = loaded.config, self.config
        revises = own.error_correction.use_error_correction if use_error_correction is None else use_error_correction
        if revises and config.train.objective != "error_correction":
            raise ConfigError(f"use_error_correction=True: {self.workdir} was trained without it; train with it first")
        config.error_correction.use_error_correction = revises
        config.tot.update(own.tot)
        validation.validate(config, 1, loaded)
        if not (own.tot.use_tot if use_tot is None else use_tot):
            return TrainedRun(self.workdir, config).generate(list(prompts), seed=seed, **how)
        task = solving.task_of(config)
        for problem in prompts:
            try:
                task.check(problem)
            except ValueError as error:
                raise ConfigError(f"use_tot=True: {problem}: {error}") from None
        trained = TrainedRun(self.workdir, config)
        with mesh_context(trained.run.mesh):
            found, _ = solving.solve(engine_of(trained.run, trained.params), config, list(prompts), seed)
        return [one.answer or "" for one in found]
