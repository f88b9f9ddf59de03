# SPDX-License-Identifier: Apache-2.0
"""The model of a run as scoring/ takes it, on the run's mesh; and the check that all hosts score the same."""

import hashlib
from collections.abc import Callable

from checkpointing.checkpoints import Checkpoints
from checkpointing.source_run import newest_checkpoint, restore_eval_params
from cluster import processes
from core.assembly import Run, assemble
from inference.prompts import text_start
from parallelism.mesh import mesh_context
from scoring.likelihood import LanguageModel
from settings.decoding import dropless


def scored_model(run: Run, params: dict, tokenizer, on_batch: Callable, *, is_trained: bool) -> LanguageModel:
    """Return the language model with these parameters; a batch has as many tokens as one of evaluation.

    `is_trained` as in `text_start`.
    """
    prefix = tuple(text_start(tokenizer, run.config, is_trained=is_trained))
    return LanguageModel(
        run.graph, params, run.mesh, tokenizer, prefix, max_length=run.config.model.max_length,
        tokens_per_batch=run.eval_rows * run.config.train.sequence_length, on_batch=on_batch,
    )  # fmt: skip


def restored_model(config, address, tokenizer, on_batch: Callable) -> tuple[LanguageModel, int]:
    """Return the model of the newest valid checkpoint of a run, and the step of that checkpoint."""
    run = assemble(dropless(config))
    with mesh_context(run.mesh), Checkpoints(address) as checkpoints:
        step = newest_checkpoint(checkpoints, config)
        params = restore_eval_params(checkpoints, step, run.abstract_params)
    return scored_model(run, params, tokenizer, on_batch, is_trained=step > 0), step  # an import is step 0


def check_same_on_hosts(items: list, what: str) -> None:
    """Raise ConfigError if another process has read other items, which would need other batches."""
    processes.check_same({"digest": hashlib.sha256(repr(items).encode()).hexdigest()[:12]}, what)
