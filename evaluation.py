# SPDX-License-Identifier: Apache-2.0
"""What a model is worth: its loss on held-out documents, and what it writes."""

import math
from collections.abc import Callable

import assembly
from input_pipeline import batches as pipeline
from input_pipeline import corpus as corpora
from parallelism import processes
from parallelism.mesh import mesh_context
from parallelism.placement import local_rows, place
from reasoning.sampling import continue_texts
from training.checkpoints import Checkpoints
from training.evaluation import evaluate

SAMPLE_PROMPT = "def "
SAMPLE_TEMPERATURE = 0.7


def evaluate_heldout(
    run: assembly.Run, state, corpus: corpora.Corpus, stop: Callable = lambda: False, num_batches: int | None = None
):
    """Return ({name: mean}, weight of the loss) of what is held out; None where it was stopped.

    Args:
      stop: called before each batch, in all processes alike: whether to stop here.
      num_batches: of a global batch each, evenly spread; default: all documents.
    """
    sharding = run.batch_sharding
    batches = pipeline.evaluation_batches(
        corpus.heldout, sequence_length=run.config.train.sequence_length, global_batch=run.eval_rows,
        rows=local_rows(sharding, run.eval_rows), num_batches=num_batches and num_batches * run.num_microbatches,
        readers=run.config.data.readers, prefetch=run.config.data.prefetch,
    )  # fmt: skip
    batches = place(batches, sharding, run.eval_rows)
    return evaluate(run, state.evaluated, batches, stop)


def heldout_lines(run: assembly.Run, figures: dict, weight: int, corpus: corpora.Corpus) -> list[str]:
    """Return what was found on what is held out, in bits per byte too where there is text."""
    name, values, unit = run.objective.told(figures)
    documents = f" of {corpus.heldout.num_documents:,} documents" if corpus.heldout.num_documents else ""
    lines = [f"held-out {name}: {values}, over {weight:,} {unit}{documents}"]
    if corpus.gzip_bits_per_byte is not None:
        bits = figures["loss"] * weight / math.log(2) / corpus.heldout.num_bytes
        lines.append(f"held-out bits per byte: {bits:.2f}   gzip -9: {corpus.gzip_bits_per_byte:.2f}")
    return lines


def sample_lines(run: assembly.Run, params: dict, tokenizer) -> list[str]:
    """Return what the model writes after a short prompt."""
    room = run.config.model.max_length - len(tokenizer.encode(SAMPLE_PROMPT)) - 1
    text = continue_texts(
        run, params, tokenizer, [SAMPLE_PROMPT], max_tokens=min(run.config.evaluation.sample_tokens, room),
        temperature=SAMPLE_TEMPERATURE, seed=run.config.train.seed,
    )[0]  # fmt: skip
    lines = (SAMPLE_PROMPT + text).rstrip().split("\n")
    return [f"sample (temperature {SAMPLE_TEMPERATURE}):", *["  | " + line for line in lines]]


def evaluate_newest(config, workdir, corpus: corpora.Corpus) -> None:
    """Print the loss of a workdir's newest checkpoint on all held-out documents of a corpus."""
    run = assembly.assemble(config)
    with Checkpoints(workdir) as checkpoints, mesh_context(run.mesh):
        step = checkpoints.newest_or_error()
        state = checkpoints.restore(step, run.abstract_state)
        found = evaluate_heldout(run, state, corpus)
    if processes.index() == 0:
        print("\n".join([f"checkpoint: {workdir}/checkpoints/{step}", *heldout_lines(run, *found, corpus)]))
