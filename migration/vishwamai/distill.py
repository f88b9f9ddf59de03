# SPDX-License-Identifier: Apache-2.0
"""DistillationTrainer: trains a student of a trained teacher with the objective "distillation" of train.train."""

import pathlib
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import optax

from configs.errors import ConfigError
from migration.vishwamai import keys, training
from migration.vishwamai.device_mesh import attached
from objectives.distillation import stream_distance
from settings import stored_config

STUDENT = {  # names of the guide's student_config, in a section `model`
    "num_heads": "num_attention_heads", "hidden_dim": "hidden_size", "mlp_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
}  # fmt: skip
HIDDEN_WEIGHT = 0.1  # of the distance of both streams


class DistillationTrainer:
    """A teacher, and the configuration of its student.

    Attributes:
      config: of Torus; the weights of the loss are in its section `distillation`.
    """

    def __init__(self, teacher_model: str | pathlib.Path | training.VishwamAIPipeline, student_config: Mapping):
        """Read the teacher's configuration; its tokenizer and data are the student's too.

        Args:
          teacher_model: the folder of a trained run, or its pipeline.
          student_config: sizes of the model, and sections such as `training` and `distillation` if wanted.

        Raises:
          ConfigError: there is no such run, a key is unknown, or the vocabulary is not that of the teacher.
        """
        of_pipeline = isinstance(teacher_model, training.VishwamAIPipeline)
        teacher = teacher_model.workdir if of_pipeline else teacher_model
        if not isinstance(teacher, str | pathlib.Path):
            raise ConfigError(f"teacher_model={type(teacher).__name__}: give the folder of a trained run")
        sections = {name: part for name, part in student_config.items() if isinstance(part, Mapping)}
        sizes = {STUDENT.get(name, name): size for name, size in student_config.items() if name not in sections}
        losses = {"hidden_weight": HIDDEN_WEIGHT} | sections.get("distillation", {})
        config = keys.recipe({"model": sizes} | sections | {"distillation": losses}, "student_config")
        of_teacher = stored_config.load_to_read(pathlib.Path(teacher), {}).config
        words = of_teacher.model.vocab_size
        if words != config.model.vocab_size:
            raise ConfigError(f"student_config: vocab_size={config.model.vocab_size} is not the teacher's; use {words}")
        config.data.update(of_teacher.data)
        config.train.objective, config.distillation.teacher = "distillation", str(teacher)
        self.config, self._devices = config, len(attached(keys.cores(sections)))
        training.loader_of(None, config, self._devices)

    def advanced_loss_functions(
        self, student_logits, teacher_logits, student_embeddings, teacher_embeddings, labels, mask
    ):  # fmt: skip
        """Return the mean loss of the tokens of `mask`, a float32 number to differentiate by the student's arrays.

        It is that of objectives/distillation.py: cross-entropy, divergence and distance of the embeddings, each with
        its weight. No gradient reaches the teacher's arrays.

        Args:
          student_logits, teacher_logits: [B, T, V].
          student_embeddings, teacher_embeddings: [B, T, D], or None for neither.
          labels: int [B, T].
          mask: [B, T], 0 for tokens to leave out.

        Raises:
          ConfigError: both embeddings differ in width; a run learns a projection between them.
        """
        how = self.config.distillation
        student, teacher = student_logits.astype(jnp.float32), jax.lax.stop_gradient(teacher_logits.astype(jnp.float32))
        log_of = [jax.nn.log_softmax(logits / how.temperature) for logits in (teacher, student)]
        first, second = log_of[::-1] if how.divergence == "reverse" else log_of
        loss_BT = how.soft_weight * how.temperature**2 * optax.losses.kl_divergence_with_log_targets(second, first)
        loss_BT += how.hard_weight * optax.losses.softmax_cross_entropy_with_integer_labels(student, labels)
        if student_embeddings is not None:
            if student_embeddings.shape != teacher_embeddings.shape:
                raise ConfigError(
                    f"embeddings of widths {student_embeddings.shape[-1]} and {teacher_embeddings.shape[-1]} need a "
                    "projection, which improved_training_strategies learns; pass None for both here"
                )
            distance_BT = stream_distance(student_embeddings, jax.lax.stop_gradient(teacher_embeddings))
            loss_BT += how.hidden_weight * distance_BT
        return jnp.where(mask != 0, loss_BT, 0).sum() / jnp.maximum((mask != 0).sum(), 1)

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
        self.config.train.loss_chunk_tokens = chunk_tokens
        if gradient_accumulation_steps is not None:
            self.config.train.gradient_accumulation = gradient_accumulation_steps
        loader = training.loader_of(train_loader, self.config, self._devices)
        return training.run(self.config, pathlib.Path(workdir), loader)
