# SPDX-License-Identifier: Apache-2.0
"""Evaluate a model: its loss on held-out documents, and a sample of text."""

import math
import shlex
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from configs.errors import visible
from core import assembly, interpreter
from inference.prompts import text_prompt, text_start
from inference.sampling import continue_texts
from input_pipeline import batches as pipeline
from input_pipeline import corpus as corpora
from input_pipeline.tokenization import AnyTokenizer
from input_pipeline.windows import Windows
from parallelism.placement import check_ids, local_rows, place
from reporting.step_log import as_count, format_evaluation

OPENING_TOKENS, OPENING_WORDS = 16, 2  # of a held-out document: tokens to read, and words to take as a prompt
SAMPLE_TEMPERATURE = 0.7
MOST_NEXT_TOKENS = 64  # of the command that the summary ends with
SAMPLE_LINES, SAMPLE_WIDTH = 12, 100  # limits of a sample: lines, and characters per line
Progress = Callable[[int, int], object]  # is called with the number of batches done, and of all


def evaluate_heldout(context, num_batches: int | None = None) -> tuple[dict, int] | None:
    """Return (figures by name, weight of the loss in tokens or puzzles) of the held-out data; None if it was stopped.

    A figure is a mean, NaN if its weight is 0, or what the objective's `summary` computes of the means. `context` is an
    EvaluationContext, see core/evaluators.py. `num_batches` is a number of global batches, spread evenly over the data;
    None means all documents.
    """
    batches = heldout_batches(context.run, context.corpus, num_batches, context.on_lost, context.progress)
    if (sums := summed_figures(context, batches)) is None:
        return None
    return summary_of(context.run, sums), as_count(sums["loss"][1])


def summed_figures(context, batches: Iterable[dict]) -> dict[str, np.ndarray] | None:
    """Return {figure: its sum and its weight, float64 [2]} of batches in an EvaluationContext; None if stopped."""
    sums = {}
    for batch in batches:
        if context.stop():
            return None
        for name, pair in context.run.eval_step(context.params, batch, context.frozen).items():
            sums[name] = sums.get(name, 0.0) + np.asarray(pair, float)
    return sums


def summary_of(run: assembly.Run, sums: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the figures of sums: means, NaN if a weight is 0, and what the objective computes of them."""
    means = {name: float(total / weight) if weight else math.nan for name, (total, weight) in sums.items()}
    figures = run.objective.summary(means)
    if not isinstance(figures, dict) or "loss" not in figures:
        raise TypeError(f"summary of the objective returned {figures!r}; it must return a dictionary with 'loss'")
    return figures


def heldout_batches(
    run: assembly.Run, corpus: corpora.Corpus, num_batches: int | None = None, on_lost: pipeline.OnLost | None = None,
    progress: Progress | None = None,
) -> Iterator[dict]:  # fmt: skip
    """Return the held-out data as batches of `run.eval_rows` on the devices.

    `num_batches` as for `evaluate_heldout`; `on_lost` and `progress` as in EvaluationContext of core/evaluators.py.
    """
    taken = num_batches and num_batches * run.num_microbatches
    batches = batches_of_rows(run, corpus, run.eval_rows, taken, on_lost)
    total = -(-corpus.heldout.num_examples(run.config.train.sequence_length) // run.eval_rows)
    return _followed(batches, min(taken or total, total), progress) if progress else batches


def _followed(batches: Iterator[dict], total: int, progress: Progress) -> Iterator[dict]:
    """Yield batches, and report each once the next one is asked for."""
    for done, batch in enumerate(batches, start=1):
        yield batch
        progress(done, total)


def batches_of_rows(
    run: assembly.Run, corpus: corpora.Corpus, rows: int, num_batches: int | None,
    on_lost: pipeline.OnLost | None = None,
) -> Iterator[dict]:  # fmt: skip
    """Return the held-out data as batches of `rows` rows on the devices; see `heldout_batches`."""
    sharding = run.batch_sharding
    batches = pipeline.evaluation_batches(
        corpus.heldout, sequence_length=run.config.train.sequence_length, global_batch=rows,
        rows=local_rows(sharding, rows), num_batches=num_batches,
        readers=run.config.data.readers, prefetch=run.config.data.prefetch, on_lost=on_lost,
    )  # fmt: skip
    return place(checked_batches(batches, run, corpus.heldout), sharding, rows)


def checked_batches(batches: Iterable[dict], run: assembly.Run, source: Windows) -> Iterator[dict]:
    """Yield what a window source reads, after a check of the widths of its arrays and of its ids.

    Raises ValueError for an array of another shape than the step's, and for a number that is not an id of the model.
    """
    model, what = run.config.model, f"a batch of data.source={run.config.data.source} ({type(source).__name__}.read)"
    names, puzzles = id_arrays(run, source)
    wanted = {name: list(leaf.shape[1:]) for name, leaf in run.abstract_batch.items()}
    for batch in batches:
        for name, array in batch.items():
            if (found := list(array.shape[1:])) != wanted.get(name, found):
                raise ValueError(f"{what}: a row of {name} is int32{found} and should be int32{wanted[name]}")
        check_ids(batch, model.vocab_size, what, names)
        check_ids(batch, model.num_puzzles, what, puzzles, "model.num_puzzles")
        yield batch


def id_arrays(run: assembly.Run, source: Windows) -> tuple[list[str], list[str]]:
    """Return the arrays of a source that have ids of the vocabulary, and those that have rows of the puzzle table.

    An array of another type than integers has bits of numbers, and one label for a row of inputs may be of any class.
    A held-out set with more puzzles than the table is read with rows of other puzzles.
    """
    model, step = run.config.model, run.abstract_batch
    are_ids = {name for name, leaf in step.items() if name in source.fills and np.issubdtype(leaf.dtype, np.integer)}
    tokens, puzzles = (), ("puzzle_identifiers",) if 0 < source.num_identifiers <= model.num_puzzles else ()
    if "segments" in step:
        tokens = ("tokens", "targets")
    elif source.largest_input:
        tokens = ("labels",)
    elif source.vocab_size and not source.input_dim:  # else the arrays may have any numbers
        tokens = ("inputs", "labels") if "labels" in step and len(step["labels"].shape) > 1 else ("inputs",)
    return [name for name in tokens if name in are_ids], [name for name in puzzles if name in are_ids]


def heldout_lines(run: assembly.Run, figures: dict, weight: int, corpus: corpora.Corpus) -> list[str]:
    """Return the held-out metrics in words; for text, bits per byte too."""
    name, values, unit = format_evaluation(run.objective, figures, weight)
    documents = f" of {corpus.heldout.num_documents:,} documents" if corpus.heldout.num_documents else ""
    lines = [f"held-out {name}: {values}, over {weight:,} {unit}{documents}"]
    if line := corpus.heldout.packing_summary(run.config.train.sequence_length):
        lines.append(f"held out: {line}")
    text = corpus.heldout
    if text.num_bytes and run.objective.reports_likelihood and not corpus.is_of_conversations:
        # Not by `weight`, which lacks the tokens of a batch that was lost, whose bytes count.
        bits = figures["loss"] / math.log(2) * text.num_tokens / text.num_bytes
        unigram = corpus.unigram_bits_per_byte
        compared = "" if unigram is None else f"   unigram model: {unigram:.2f}"
        lines.append(f"held-out bits per byte: {bits:.2f}{compared}")
    return lines


def opening(corpus: corpora.Corpus, sequence_length: int) -> str:
    """Return the first words of a held-out document as a prompt; "" if its first line has none that can be typed."""
    batch = corpus.heldout.read(np.array([0]), sequence_length)
    first = batch["tokens"][0][batch["segments"][0] == 1].tolist()  # some targets of a task are ignored
    first = [token for token in first if token != corpus.tokenizer.end_of_document][:OPENING_TOKENS]
    words = corpus.tokenizer.decode(first).lstrip().split("\n")[0].split()
    words = [word for word in words[:OPENING_WORDS] if word.isprintable()]
    return " ".join(words) + " " if words else ""


def room_after(prompt: str, config, tokenizer: AnyTokenizer) -> int:
    """Return how many tokens the model may write after a prompt; less than 1: none."""
    start = text_start(tokenizer, config, is_trained=True)
    return config.model.max_length - text_prompt(tokenizer, prompt, start).num_tokens


def next_lines(config, corpus: corpora.Corpus, address) -> list[str]:
    """Return a line with a command that generates text with the run at `address`; [] if no token fits its prompt."""
    asked, room = "--message=Hello", config.model.max_length // 2
    if not corpus.is_of_conversations:
        prompt = opening(corpus, config.train.sequence_length)
        asked, room = f"--prompt={shlex.quote(prompt)}", room_after(prompt, config, corpus.tokenizer)
    call = f"{interpreter.call_of('generate.py')} {shlex.quote(f'--workdir={address}')} {asked}"
    return [f"next: {call} --max_tokens={min(MOST_NEXT_TOKENS, room)}"] if room > 0 else []


def sample_lines(run: assembly.Run, params: dict, corpus: corpora.Corpus) -> list[str]:
    """Return the model's continuation of the first words of a held-out document, at most SAMPLE_LINES lines."""
    prompt = opening(corpus, run.config.train.sequence_length)
    room = room_after(prompt, run.config, corpus.tokenizer)
    if room < 1:
        return []
    text = continue_texts(
        run.dropless(), params, corpus.tokenizer, [prompt], max_tokens=min(run.config.evaluation.sample_tokens, room),
        temperature=SAMPLE_TEMPERATURE, seed=run.config.train.seed,
        start=text_start(corpus.tokenizer, run.config, is_trained=True),
    )[0]  # fmt: skip
    lines = visible(text.rstrip()).split("\n")
    shown = [line if len(line) <= SAMPLE_WIDTH else f"{line[:SAMPLE_WIDTH]}..." for line in lines[:SAMPLE_LINES]]
    shown += ["..."] if len(lines) > SAMPLE_LINES else []
    return [f"sample (temperature {SAMPLE_TEMPERATURE}):", *["  | " + line for line in shown]]
