# SPDX-License-Identifier: Apache-2.0
"""VishwamAI's pipeline, profiler and trainers: a model and its run, its steps timed, and its training."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence

import train
from checkpointing import frozen_models
from configs.errors import ConfigError
from core import solving
from core.loader import Loader, LoaderLoss
from files.paths import expanded
from migration.vishwamai import keys
from migration.vishwamai.device_mesh import TPUMeshContext, attached
from objectives import distillation
from profiling.loop import LoopProfile
from profiling.windows import Window
from settings import stored_config, validation
from trained_run import TrainedRun, checked

FOLDER = "runs/vishwamai"
HIDDEN_WEIGHT = 0.1  # in distillation, of the distance of both streams


class VishwamAIPipeline:
    """A model: its Torus `config`, the `given` dotted keys, and `workdir`, the folder of its run (`checkpoint_dir`)."""

    def __init__(self, config: Mapping):
        """Raises ConfigError: a key is unknown or not supported, or a value is inconsistent."""
        self.given, self.config = keys.KEYS.dotted(config), keys.recipe(config)
        self.workdir = expanded(str(self.given.get(keys.FOLDER) or FOLDER))

    def generate(
        self, prompts: Sequence[str], *, use_tot: bool | None = None, use_error_correction: bool | None = None,
        seed: int = 0, **how,
    ) -> list[str]:  # fmt: skip
        """Return each prompt with its continuation by the newest checkpoint; `how` is as in TrainedRun.generate.

        Args:
          use_tot: search instead: each prompt is a problem of the task that the model was trained on. Return the
            answers, "" where none was found. Default: the configuration's.
          use_error_correction: revise what was drawn. Default: the configuration's.
        """
        prompts = checked(prompts)
        loaded = stored_config.load_to_read(self.workdir, {})
        config, own = loaded.config, self.config
        revises = own.error_correction.use_error_correction if use_error_correction is None else use_error_correction
        if revises and config.train.objective != "error_correction":
            raise ConfigError(f"use_error_correction=True: {self.workdir} was trained without it; train with it first")
        config.error_correction.use_error_correction = revises
        config.tot.update(own.tot)
        validation.validate(config, 1, loaded)
        if not (own.tot.use_tot if use_tot is None else use_tot):
            return TrainedRun(self.workdir, config).generate(prompts, seed=seed, **how)
        solving.check(config, prompts, "use_tot=True: ")  # before the slow restore of the weights
        return [found.answer for found in TrainedRun(self.workdir, config).solve(prompts, seed)]


class TPUProfiler(LoopProfile):
    """Call `start_step` and `end_step` around each step; the trainer does so itself."""

    def __init__(self, config: Mapping):
        """The trainer's run has a trace of the steps 10 to 14."""
        super().__init__(keys.recipe(config), Window(10, 14))

    get_metrics_summary = LoopProfile.summary
    add_detailed_metrics = LoopProfile.add_details
    get_actionable_recommendations = LoopProfile.advice


class VishwamAITrainer:
    """A run in the pipeline's folder on the mesh of `mesh_context`; `profiler` times its steps, `config` is Torus's."""

    def __init__(
        self, pipeline: VishwamAIPipeline, config: Mapping, train_loader: Iterable[Mapping] | None = None,
        eval_loader: Iterable[Mapping] | None = None,
    ):  # fmt: skip
        """Prepare a run; ConfigError if a key is wrong, or does not fit the devices.

        Args:
          config: of the training; what it leaves out is that of the pipeline.
          train_loader, eval_loader: batches, see core/loader.py; without the first, the run trains on `data.path`.
        """
        own = keys.KEYS.dotted(config)
        folder = own.get(keys.FOLDER)
        if folder and expanded(str(folder)).absolute() != pipeline.workdir.absolute():
            raise ConfigError(f"{keys.FOLDER}={folder}: the pipeline has {pipeline.workdir}; give the same to both")
        given = pipeline.given | own
        self.pipeline, self.mesh_context, self.profiler = pipeline, TPUMeshContext(given), TPUProfiler(given)
        self.config = self.mesh_context.config
        self._loader = loader_of(train_loader, self.config, self.mesh_context.mesh.size)
        every = self.config.train.eval_every
        ranks = self._loader is not None  # else the held-out loss of `data.path` does
        self._evaluators = [] if eval_loader is None else [LoaderLoss(every, eval_loader, ranks_checkpoints=ranks)]

    def train(self):
        """Train up to `training.max_steps`, or continue the run in the pipeline's folder; return train.Result."""
        return train.train(
            self.config, self.pipeline.workdir, self._loader, callbacks=[self.profiler], evaluators=self._evaluators
        )


class DistillationTrainer:
    """A teacher and its student; `config` of Torus is the student's, with the loss in its section `distillation`."""

    def __init__(self, teacher_model: str | pathlib.Path | VishwamAIPipeline, student_config: Mapping):
        """Read the configuration of the teacher, a trained run's folder or pipeline; its data are the student's too.

        `student_config` has sizes of the model, and sections such as `training` and `distillation` if wanted, but not
        `data`.
        """
        is_pipeline = isinstance(teacher_model, VishwamAIPipeline)
        teacher = teacher_model.workdir if is_pipeline else teacher_model
        if not isinstance(teacher, str | pathlib.Path):
            raise ConfigError(f"teacher_model={type(teacher).__name__}: give the folder of a trained run")
        sections = {name: part for name, part in student_config.items() if isinstance(part, Mapping)}
        if "data" in sections:
            raise ConfigError(
                "student_config: the data are the teacher's; leave out `data`, and change `config.data` of the trainer"
            )
        sizes = {name: size for name, size in student_config.items() if name not in sections}
        losses = {"hidden_weight": HIDDEN_WEIGHT} | sections.get("distillation", {})
        config = keys.recipe({"model": sizes} | sections | {"distillation": losses}, "student_config")
        config.train.objective, config.distillation.teacher = "distillation", str(teacher)
        (model,) = distillation.make(config).frozen_models()
        config.data.update(frozen_models.configuration_of(model, config).data)
        self.config, self._devices = config, len(attached(sections))
        validation.validate(config, self._devices)

    def advanced_loss_functions(
        self, student_logits, teacher_logits, student_embeddings, teacher_embeddings, labels, mask
    ):  # fmt: skip
        """Return the mean loss of the tokens of `mask`, float32; see `of_logits` of objectives/distillation.py.

        Logits are [B, T, V], embeddings [B, T, D] of one width, or None for both; labels and mask are int [B, T].
        A label below 0 has no loss. Raises ValueError for other shapes.
        """
        if (student_embeddings is None) != (teacher_embeddings is None):
            raise ValueError("one of student_embeddings and teacher_embeddings is None; give both, or neither")
        streams = None if student_embeddings is None else (student_embeddings, teacher_embeddings)
        return distillation.make(self.config).of_logits(student_logits, teacher_logits, labels, mask, streams)

    def improved_training_strategies(
        self, workdir: str | pathlib.Path, train_loader: Iterable[Mapping] | None = None, *,
        gradient_accumulation_steps: int | None = None, chunk_tokens: int = 0,
    ):  # fmt: skip
        """Train the student in a folder, whose checkpoint is a model like any other; return train.Result.

        Args:
          train_loader: batches, see core/loader.py; None: the teacher's documents.
          gradient_accumulation_steps: microbatches of an update; None: those of the configuration.
          chunk_tokens: tokens whose logits are in memory at once; 0: automatic.
        """
        config = self.config.copy_and_resolve_references()
        config.train.loss_chunk_tokens = chunk_tokens
        if gradient_accumulation_steps is not None:
            config.train.gradient_accumulation = gradient_accumulation_steps
        loader = loader_of(train_loader, config, self._devices)
        return train.train(config, pathlib.Path(workdir), loader)


def loader_of(batches: Iterable[Mapping] | None, config, num_devices: int) -> Loader | None:
    """Return a loader of batches, if there are any; check the configuration, which gets the length of their rows."""
    loader = None if batches is None else Loader(batches)
    if loader:
        config.train.sequence_length = loader.length
    validation.validate(config, num_devices)
    return loader
