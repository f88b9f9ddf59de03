# SPDX-License-Identifier: Apache-2.0
"""The model of a run as scoring/ takes it, on the run's mesh; and the check that all hosts score the same."""

import hashlib
from collections.abc import Callable

from cluster import processes
from core.assembly import Run
from inference.prompts import text_start
from scoring.likelihood import LanguageModel


def scored_model(run: Run, params: dict, tokenizer, on_batch: Callable, *, is_trained: bool) -> LanguageModel:
    """Return the language model with these parameters; a batch has as many tokens as one of evaluation.

    `is_trained` as in `text_start`.
    """
    prefix = tuple(text_start(tokenizer, run.config, is_trained=is_trained))
    return LanguageModel(
        run.graph, params, run.mesh, tokenizer, prefix, max_length=run.config.model.max_length,
        tokens_per_batch=run.eval_rows * run.config.train.sequence_length, on_batch=on_batch,
    )  # fmt: skip


def check_same_on_hosts(items: list, what: str) -> None:
    """Raise ConfigError if another process has read other items, which would need other batches."""
    processes.check_same({"digest": hashlib.sha256(repr(items).encode()).hexdigest()[:12]}, what)
