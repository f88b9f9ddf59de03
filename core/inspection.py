# SPDX-License-Identifier: Apache-2.0
"""Inspects a run without training, for train.py: the validity of its checkpoints, and the documents of a step."""

import math
import pathlib

import numpy as np

from checkpointing.checkpoints import MOST_LOOKS, Checkpoints
from checkpointing.folder_store import DAMAGED
from checkpointing.retention import Retention
from checkpointing.source_run import check_model, restore_eval_params
from checkpointing.store import Store
from cluster import processes
from configs.errors import ConfigError, visible
from core import assembly
from files.json_reader import JsonError
from input_pipeline import corpus as corpora
from input_pipeline import ledger, packing
from parallelism.mesh import mesh_context
from parallelism.placement import place
from reporting.display import aligned
from reporting.metrics import WENT_BACK, Line, read_lines
from settings import preference
from settings.together import DRAWS


def checkpoints_table(
    address, workdir: pathlib.Path, retention: Retention, store: Store | None = None
) -> tuple[list[str], bool]:
    """Return a line for each checkpoint, with its verdict and the reason to keep it, and whether all are valid.

    A checkpoint is saved before it is evaluated, so the loss of the newest one is in the metrics of `workdir` alone.
    """
    with Checkpoints(address, store=store) as checkpoints:
        for _ in range(MOST_LOOKS):
            verdicts = {step: checkpoints.damage(step) for step in checkpoints.steps()}
            if None not in verdicts.values():  # a run deletes its older checkpoints when it has saved a newer one
                break
        problems = {step: found for step, found in verdicts.items() if found is not None}
        good = [step for step, found in problems.items() if not found]
        records = {step: checkpoints.record(step) for step in good}
        others = checkpoints.store.others()
    losses = {int(step): loss for record in records.values() for step, loss in record.get("losses", {}).items()}
    lines = []
    try:
        losses |= heldout_losses(workdir)
    except (JsonError, OSError) as error:
        lines.append(f"{error}; the best checkpoint is ranked without it")
    reasons = retention.reasons(good, losses)
    for step, found in problems.items():
        fate = f"kept: {reasons[step]}" if step in reasons else "the next save deletes it"
        lines.append(f"checkpoint {step}: " + (f"DAMAGED: {'; '.join(found)}" if found else f"good  ({fate})"))
    lines += [f"{name}: {what}" for name, what in others.items()]
    lines.append(f"{len(good)} of {len(problems)} good" if problems else f"no checkpoint in {address}")
    return lines, len(good) == len(problems) and (bool(good) or DAMAGED not in "".join(others))


def heldout_losses(workdir: pathlib.Path) -> dict[int, float]:
    """Return the held-out losses in the metrics of a run by step, the last one of a step that was repeated."""
    lines = metrics_of(workdir)
    return {line["step"]: line["eval_loss"] for line in lines if line.get("eval_loss") is not None}


def explain_step(config, workdir: pathlib.Path, address, step: int, store: Store | None = None) -> list[str]:
    """Return a table of the documents that a step of a run was trained on.

    Each document has its loss under the newest valid checkpoint, if there is one. The highest loss comes first, so that
    an unusual document is at the top. Puzzles and pairs of answers, one per row, have no losses. Raises DataError if
    the run has not reached this step, or if its documents no longer exist; and ConfigError for an objective that trains
    on what the model draws.
    """
    if config.train.objective in DRAWS:
        raise ConfigError(
            f"a step of train.objective={config.train.objective} trains on answers that the model drew, and not on "
            f"documents; {workdir}/rollouts.jsonl has them with their prompts"
        )
    corpus = with_documents(config)
    section = processes.shared("section", lambda: ledger.section_of(workdir, step, last_logged_step(workdir)))
    examples = ledger.explain(section, step, corpus)
    if "segments" not in corpus.train.arrays or config.data.source == preference.SOURCE:
        return _table(examples)
    with Checkpoints(address, store=store) as checkpoints:
        newest = checkpoints.newest()
        if newest is None:
            return _table(examples)
        check_model(checkpoints, newest, config)
        run = assembly.assemble(config)
        with mesh_context(run.mesh):
            params = restore_eval_params(checkpoints, newest, run.abstract_params)
            losses = document_losses(run, params, corpus, section, step, examples)
    return [f"loss in nats per token, under checkpoint {newest}", *_table(examples, losses)]


def documents_of(config, workdir: pathlib.Path, steps: range) -> list[str]:
    """Return tables of the documents that these steps of a run were trained on."""
    corpus, lines = with_documents(config), []
    for step in steps:
        section = ledger.section_of(workdir, step, steps.stop)
        lines += [f"step {step}", *_table(ledger.explain(section, step, corpus)), ""]
    return lines


def _table(examples: list[ledger.Example], losses: dict | None = None) -> list[str]:
    """Return lines for a terminal, without control characters: strangers may have named the files and columns."""
    return [visible(line) for line in aligned(ledger.table(examples, losses))]


def with_documents(config) -> corpora.Corpus:
    """Return the corpus of a run, with the names of its documents."""
    return corpora.prepare(
        config.data, vocab_size=config.model.vocab_size, vocab_size_typed=False, announce=lambda line: None,
        with_documents=True,
    )  # fmt: skip


def document_losses(run: assembly.Run, params, corpus, section: dict, step: int, examples) -> dict:
    """Return {(row, segment): loss in nats per token} of every document in a step's batch, each evaluated alone.

    The loss is NaN if all tokens of the document have weight 0.
    """
    mixture = corpus.train.recorded(section["mixture"], section["skips"])
    batch = mixture.read(ledger.taken(section, step), section["sequence_length"], section["seed"])
    places = [(example.row, excerpt.segment) for example in examples for excerpt in example.excerpts]

    def alone(row: int, segment: int) -> dict:
        only = {name: np.zeros((run.eval_rows, batch[name].shape[1]), np.int32) for name in packing.KEYS}
        for name, rows in only.items():
            rows[0] = batch[name][row] * (batch["segments"][row] == segment if segment else 1)
        return only

    placed = place((alone(*of) for of in places), run.batch_sharding, run.eval_rows)
    sums = [run.eval_step(params, document)["loss"] for document in placed]
    return {
        of: float(total) / float(weight) if weight else math.nan
        for of, (total, weight) in zip(places, sums, strict=True)
    }


def last_logged_step(workdir: pathlib.Path) -> int:
    """Return the last step in metrics.jsonl of a run since it last went back; 0 if it has none."""
    last = 0
    for line in metrics_of(workdir):
        step = line.get("step", 0)
        last = step if line.get("event") in WENT_BACK else max(last, step)
    return last


def metrics_of(workdir: pathlib.Path) -> list[Line]:
    """Return the lines of metrics.jsonl of a run; [] if it has none."""
    path = workdir / "metrics.jsonl"
    return read_lines(path) if path.exists() else []
