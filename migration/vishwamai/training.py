# SPDX-License-Identifier: Apache-2.0
"""VishwamAITrainer: trains a pipeline's model on a caller's batches with train.train, its mesh and its profiler."""

from collections.abc import Iterable, Mapping

from migration.vishwamai import keys
from migration.vishwamai.device_mesh import TPUMeshContext
from migration.vishwamai.pipeline import VishwamAIPipeline
from settings import validation


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
        given = pipeline.given | keys.dotted(config)
        self.pipeline, self.mesh_context = pipeline, TPUMeshContext(given)
        from core import loader
        from migration.vishwamai.profiler import TPUProfiler

        self.profiler, self.config = TPUProfiler(given), self.mesh_context.config
        self._loader = None if train_loader is None else loader.Loader(train_loader)
        if self._loader:
            self.config.train.sequence_length = self._loader.length
        every = self.config.train.eval_every
        self._evaluators = [] if eval_loader is None else [loader.LoaderLoss(every, eval_loader)]
        validation.validate(self.config, self.mesh_context.mesh.size)

    def train(self):
        """Train up to `training.max_steps`, or continue the run in the pipeline's folder; return train.Result."""
        import train

        callbacks = [callback for callback in (self.profiler, self._loader) if callback]
        folder = self.pipeline.workdir
        return train.train(self.config, folder, self._loader, callbacks=callbacks, evaluators=self._evaluators)
