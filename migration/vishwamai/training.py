# SPDX-License-Identifier: Apache-2.0
"""VishwamAI's pipeline, profiler and trainer: a model and the folder of its run, its steps timed, and its training."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence

from configs.errors import ConfigError
from core.loader import Loader, LoaderLoss
from migration.vishwamai import keys
from migration.vishwamai.device_mesh import TPUMeshContext
from profiling.loop import LoopProfile
from profiling.windows import Window
from settings import stored_config, validation

FOLDER = "runs/vishwamai"


class VishwamAIPipeline:
    """A model: `config` of Torus, the `given` dotted keys, and `workdir`, the folder of its run: `checkpoint_dir`."""

    def __init__(self, config: Mapping):
        """Raises ConfigError: a key is unknown or not supported, or a value is inconsistent."""
        self.given, self.config = keys.KEYS.dotted(config), keys.recipe(config)
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


class TPUProfiler(LoopProfile):
    """Call `start_step` and `end_step` around each step; the trainer does so itself."""

    def __init__(self, config: Mapping, traced: tuple[int, int] = (10, 14)):
        """`traced`: the first and the last step of a trainer's run that are traced."""
        super().__init__(keys.recipe(config), Window(*traced))

    get_metrics_summary = LoopProfile.summary
    add_detailed_metrics = LoopProfile.add_details
    get_actionable_recommendations = LoopProfile.advice


class VishwamAITrainer:
    """A run in the pipeline's folder, on the mesh of `mesh_context`; `profiler` times its steps; `config` of Torus."""

    def __init__(
        self, pipeline: VishwamAIPipeline, config: Mapping, train_loader: Iterable[Mapping] | None = None,
        eval_loader: Iterable[Mapping] | None = None,
    ):  # fmt: skip
        """Prepare a run.

        Args:
          config: of the training; what it leaves out is that of the pipeline.
          train_loader, eval_loader: batches, see core/loader.py; without the first, the run trains on `data.path`.

        Raises:
          ConfigError: a key is unknown or not supported, or does not fit the devices.
        """
        given = pipeline.given | keys.KEYS.dotted(config)
        self.pipeline, self.mesh_context, self.profiler = pipeline, TPUMeshContext(given), TPUProfiler(given)
        self.config = self.mesh_context.config
        self._loader = loader_of(train_loader, self.config, self.mesh_context.mesh.size)
        every = self.config.train.eval_every
        self._evaluators = [] if eval_loader is None else [LoaderLoss(every, eval_loader)]

    def train(self):
        """Train up to `training.max_steps`, or continue the run in the pipeline's folder; return train.Result."""
        return run(self.config, self.pipeline.workdir, self._loader, [self.profiler], self._evaluators)


def loader_of(batches: Iterable[Mapping] | None, config, num_devices: int) -> Loader | None:
    """Return a loader of batches, if there are any; check the configuration, which gets the length of their rows."""
    loader = None if batches is None else Loader(batches)
    if loader:
        config.train.sequence_length = loader.length
    validation.validate(config, num_devices)
    return loader


def run(config, folder: pathlib.Path, loader: Loader | None, callbacks: Sequence = (), evaluators: Sequence = ()):
    """Train in a folder, on the batches of a loader if there is one; return train.Result."""
    import train

    callbacks = [*callbacks, *([loader] if loader else [])]
    return train.train(config, folder, loader, callbacks=callbacks, evaluators=evaluators)
