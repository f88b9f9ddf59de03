# SPDX-License-Identifier: Apache-2.0
"""What a training run needs before its first step: its corpus, its number of steps, its initial state."""

import math
import pathlib
from collections.abc import Sequence

import jax
import numpy as np

from checkpointing import frozen_models, state_names
from checkpointing import workdir as workdirs
from checkpointing.checkpoints import Checkpoints
from checkpointing.source_run import initial
from cluster import processes
from configs.base import keys_of
from configs.errors import ConfigError
from configs.key import PER_HOST, RESUME
from core.assembly import Run, assemble
from core.batch_fit import fit_batch
from core.between_steps.stages import position_of
from core.evaluators import Evaluator, check_names, check_without_corpus, of_run, task_items
from input_pipeline import batches
from input_pipeline import corpus as corpora
from input_pipeline.sources import check_name
from objectives.objective import FrozenModel, Objective
from reporting import preflight, sink
from settings import layouts, preference, ramp, ranges
from settings.keys import flat
from training.state import dotted

# Passes over one corpus: beyond 40 nothing is gained; each of the first 4 is worth as much as new data.
MOST_PASSES, USEFUL_PASSES = 40, 4
MANY_HELDOUT, ENOUGH_HELDOUT = 100_000_000, 10_000_000  # tokens that a new run holds out


def announce(line: str) -> None:
    """Print a line in process 0, before the display exists."""
    if processes.index() == 0:
        corpora.say(line)


def device_lines(config) -> list[str]:
    """Return lines about the devices, the processes and the mesh."""
    axes = [axis for axis in config.layout.axis_order.split(",") if axis != "dcn_data" or config.mesh[axis] > 1]
    return [
        f"Local devices: {jax.local_device_count()} ({jax.local_devices()[0].device_kind})",
        f"Global devices: {jax.device_count()}",
        f"Process index: {processes.index()}",
        f"Process count: {processes.count()}",
        "Mesh: " + " * ".join(f"{axis}={config.mesh[axis]}" for axis in axes),
    ]


def prepare(
    config, workdir: pathlib.Path, evaluators: Sequence[Evaluator], *, reads_corpus: bool, is_new: bool,
    vocab_size_typed: bool,
) -> tuple[Run, corpora.Corpus | None, list[Evaluator]]:  # fmt: skip
    """Check a run and prepare what it reads; apply `batch.fit` and set `train.eval_every`, in place.

    Mistakes are reported before the folder of a new run is made, and before its step is compiled; those that need no
    documents, before documents are read. `batch.fit` compiles steps to see which fits.

    Args:
      evaluators: those of the caller.
      reads_corpus: whether the run reads `config.data`, and not batches of the caller.
      is_new: whether the run surely has no checkpoint.
      vocab_size_typed: whether a corpus too small for `model.vocab_size` is an error.

    Returns:
      The run, on the last of its meshes; its corpus, if it reads one; and all its evaluators.
    """
    check_names(evaluators)
    check_same_arguments(config, evaluators, reads_corpus=reads_corpus)
    sink.check(config)
    for after, on_mesh in layouts.on_each_mesh(config).items():
        with layouts.named(after):
            run = assemble(on_mesh)
            preflight.check_device(run)
    if jax.tree.leaves(run.abstract_state.carry) and config.batch.ramp != "none":
        raise ConfigError(
            f"batch.ramp={config.batch.ramp} changes the number of rows, and train.objective={config.train.objective} "
            "carries something for each row from step to step; use --config.batch.ramp=none"
        )
    if is_new:
        run.objective.check_to_train()
    check_sources(run.objective, config, is_new=is_new)
    if reads_corpus:
        check_name(config.data)
    else:
        check_without_corpus(config)
    items = task_items(config)
    workdirs.check_writable(config, workdir)
    fit_batch(config, announce)
    if is_new and not config.train.epochs:
        planned_steps(config, None, None)
    corpus = prepare_corpus(config, vocab_size_typed) if reads_corpus else None
    check_tokenizers(run.objective, config, corpus)
    if corpus:
        batches.check_enough(corpus.train, config.train.sequence_length, config.train.global_batch)
    if is_new:
        check_new(config, corpus)
    set_eval_every(config, corpus)
    return run, corpus, of_run(config, corpus, items, evaluators)


def check_same_arguments(config, evaluators: Sequence[Evaluator], *, reads_corpus: bool) -> None:
    """Compare what `train` was given between all processes; ConfigError names process, host and item.

    Otherwise each host would train its part of the weights in its own way, or wait for others that never come.
    """
    values = flat(config)
    processes.check_same({key: values[key] for key in values.keys() - keys_of(PER_HOST)}, "their configuration")
    of_evaluators = {f"evaluator {one.name}": f"evaluated every {one.every} steps" for one in evaluators}
    batches = {"batches": "missing" if reads_corpus else "given"}
    processes.check_same(batches | of_evaluators, "the arguments of train()")


def prepare_corpus(config, vocab_size_typed: bool) -> corpora.Corpus:
    """Return the corpus of `config.data`, tokenised once and cached, and equal on all hosts.

    Raises ConfigError if a host has different data, or if the model's puzzle table or its inputs have another size.
    """
    preference.check_source(config)
    corpus = corpora.prepare(
        config.data, vocab_size=config.model.vocab_size, vocab_size_typed=vocab_size_typed, announce=announce
    )
    processes.check_same({"digest": corpus.digest}, "their corpus")
    for name, part in zip(corpus.names, corpus.train.parts, strict=True):
        if line := part.packing_summary(config.train.sequence_length):
            announce(f"{name}: {line}")
    for part in (*corpus.train.parts, corpus.heldout):
        part.check_counts(config.train.sequence_length)
    needed = max(part.num_identifiers for part in (*corpus.train.parts, corpus.heldout))
    if config.model.puzzle_dim and needed > config.model.num_puzzles:
        raise ConfigError(
            f"model.num_puzzles={config.model.num_puzzles} is less than the {needed} puzzles of the data; "
            f"use --config.model.num_puzzles={needed}"
        )
    check_inputs(config, corpus)
    return corpus


def check_inputs(config, corpus: corpora.Corpus) -> None:
    """Raise ConfigError if inputs of the data have other values or another size than the model's."""
    largest = max(part.largest_input for part in (*corpus.train.parts, corpus.heldout))
    if config.model.levels and largest >= config.model.levels:
        raise ConfigError(
            f"model.levels={config.model.levels} must be greater than the largest input of the data, {largest}; "
            f"use --config.model.levels={largest + 1} in a new run"
        )
    inputs = corpus.heldout.input_dim
    if inputs not in (0, config.model.input_dim):
        raise ConfigError(
            f"model.input_dim={config.model.input_dim} is not the {inputs} numbers of an input of "
            f"data.source={config.data.source}; use --config.model.input_dim={inputs} in a new run"
        )


def other_models(objective: Objective) -> list[FrozenModel]:
    """Return the frozen models whose weights are not those that the run starts from."""
    return [model for model in objective.frozen_models() if model.key != "train.init_from"]


def check_sources(objective: Objective, config, *, is_new: bool) -> None:
    """Raise ConfigError if a run whose weights are needed is missing or has no checkpoint, before documents are read.

    `is_new` says whether the run surely has no checkpoint, so that `train.init_from` initializes it.
    """
    for model in other_models(objective):
        frozen_models.source_of(model, config).check_has_checkpoint()
    if config.train.init_from and is_new:
        initial(config).check_has_checkpoint()


def may_change(run: Run, step: int) -> frozenset[str]:
    """Return the keys that may change when this run is resumed at a step.

    The batch size may not if its rows carry something from step to step, or if the next step is on the batch of this
    one. The folders of frozen models may, since a checkpoint identifies their weights by a digest.
    """
    keeps_rows = jax.tree.leaves(run.abstract_state.carry) or step % run.objective.steps_of_batch
    held = {"train.global_batch"} if keeps_rows else set()
    sources = frozen_models.sources(run.objective, run.config)
    moved = {sources[role].key for role in run.abstract_frozen}
    return (keys_of(RESUME) - held) | moved


def check_imported(run: Run, checkpoints: Checkpoints, record: dict, workdir) -> None:
    """Raise ConfigError if the objective trains parameters that the imported weights of a workdir lack."""
    wanted = state_names.names_of({state_names.PARAMS: run.abstract_state.params})
    if lacking := sorted(wanted - checkpoints.store.arrays(record["step"]).keys()):
        raise ConfigError(
            f"{workdir} has imported weights without {lacking[0].partition('.')[2]}, which "
            f"train.objective={run.config.train.objective} trains too; train in a new --workdir"
        )


def check_tokenizers(objective: Objective, config, corpus: corpora.Corpus | None) -> None:
    """Raise ConfigError if another model of the objective was trained on another tokenizer than the corpus has."""
    for model in other_models(objective) if corpus and corpus.tokenizer else ():
        frozen_models.source_of(model, config).check_tokenizer(config, corpus.tokenizer)


def set_eval_every(config, corpus: corpora.Corpus | None) -> None:
    """Convert `evaluation.every_epochs` to `train.eval_every` in place."""
    train, evaluation = config.train, config.evaluation
    if evaluation.every_epochs:
        examples = evaluation.every_epochs * corpus.train.num_examples(train.sequence_length)
        train.eval_every, evaluation.every_epochs = max(1, ramp.whole_steps(examples / train.global_batch)), 0.0


def check_new(config, corpus: corpora.Corpus | None) -> None:
    """Raise ConfigError if a run without a checkpoint cannot begin with its weights, or has no step."""
    if config.train.init_from:
        initial(config).check_can_initialize(config, corpus and corpus.tokenizer)
    planned_steps(config, corpus, None)


def planned_steps(config, corpus: corpora.Corpus | None, record: dict | None) -> int:
    """Return `train.steps`, or what tokens or epochs come to. Raises ConfigError if the epochs have no step.

    Tokens are rounded up to complete steps, and epochs down. During a ramp, each step counts with its own batch size.
    """
    train, steps = config.train, config.train.steps
    start, done, increases = position_of(record)
    if train.tokens:
        left = train.tokens / train.sequence_length - done
        steps = start + math.ceil(ramp.num_steps(config, left, start, increases))
    elif train.epochs:
        pass_examples = corpus.train.num_examples(train.sequence_length)
        left = ramp.examples_of(train.epochs, pass_examples) - done
        steps = start + ramp.whole_steps(ramp.num_steps(config, left, start, increases))
        if not steps:
            raise ConfigError(
                f"train.epochs={train.epochs:g} of {pass_examples:,} rows is less than one step; train longer, or with "
                "a smaller batch"
            )
    ranges.check_steps(steps, done + ramp.num_examples(config, max(0, steps - start), start, increases))
    return steps


def set_steps(config, corpus: corpora.Corpus | None, record: dict | None) -> tuple[int, int]:
    """Convert tokens or epochs to `train.steps` in place; return (steps done, last step).

    A line is printed if a run reads the default corpus too often, or holds out very much.
    """
    start, train = position_of(record)[0], config.train
    train.steps, train.tokens, train.epochs = planned_steps(config, corpus, record), 0, 0.0
    for line in filter(None, (repetition(config, corpus), "" if start else large_heldout(config, corpus))):
        announce(line)
    return start, train.steps


def announce_restart(workdir: pathlib.Path) -> None:
    """Say that a run begins again in the folder of one that trained, as in a copy without its checkpoints."""
    metrics = workdir / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        announce(f"{workdir} has metrics of earlier steps, but no checkpoint: the run begins again at step 0")


def kept_steps(config, record: dict) -> str:
    """Return a line if a resumed run has another batch but no other steps, which may have been epochs; else ""."""
    earlier, train = record["config"], config.train
    if train.global_batch == earlier["train.global_batch"] or train.steps != earlier["train.steps"]:
        return ""
    return (
        f"train.steps stays {train.steps:,} with the other batch; if epochs or tokens said how long to train, type "
        "--config.train.epochs or --config.train.tokens again"
    )


def is_done(record: dict | None, start: int, last_step: int, workdir: pathlib.Path) -> bool:
    """Return whether a resumed run has nothing left to train, and say so; the summary of a finished one is shown."""
    has_finished = record is not None and start >= last_step and workdirs.show_summary(workdir)
    if not has_finished and start <= last_step:
        return False
    passed = f"train.steps={last_step} has been passed. " if last_step < start else ""
    announce(
        f"{passed}{'Finished' if has_finished else 'Saved'} at step {start}; nothing was trained. "
        f"--config.train.steps={2 * start} continues the run."
    )
    return True


def repetition(config, corpus: corpora.Corpus | None) -> str:
    """Return a line if the run reads the Python library, the default corpus, more often than is of use; else ""."""
    data, train = config.data, config.train
    is_default = data.source == "python" or (data.source == "auto" and not data.path)
    if not corpus or not is_default:
        return ""
    tokens, asked = corpus.train.num_tokens, ramp.num_examples(config, train.steps) * train.sequence_length
    if asked <= MOST_PASSES * tokens:
        return ""
    most = "up to " if config.batch.ramp == "noise_scale" else ""
    return (
        f"{asked / 1e6:,.0f} M tokens are {most}{asked / tokens:,.0f} passes over the {tokens / 1e6:,.1f} M tokens of "
        f"the Python library; passes after the {MOST_PASSES}th teach nothing new (arXiv:2305.16264). Use your own "
        f"texts, --config.data.path=FOLDER, or fewer steps, --config.train.epochs={USEFUL_PASSES}"
    )


def large_heldout(config, corpus: corpora.Corpus | None) -> str:
    """Return a line if the evaluation after the last step reads very many tokens; else ""."""
    if not corpus or not corpus.is_plain_text or (tokens := corpus.heldout.num_tokens) <= MANY_HELDOUT:
        return ""
    advice = f"{'a smaller ' if config.data.validation_path else ''}--config.data.validation_path=FILE"
    # Of a single document a tenth is held out, whatever the fraction.
    if not config.data.validation_path and corpus.heldout.num_documents > len(corpus.train.parts):
        fraction = config.data.holdout_fraction * ENOUGH_HELDOUT / tokens
        advice = f"--config.data.holdout_fraction={fraction:.1g}"
    return (
        f"{tokens / 1e6:,.0f} M tokens are held out; the evaluation after the last step reads all of them, and begins "
        f"again after a stop. For about {ENOUGH_HELDOUT / 1e6:,.0f} M, begin the run with {advice}"
    )


def check_finite(state) -> None:
    """Raise ConfigError if a scalar of an optimizer's first state is not finite: no step after it could be saved."""
    for path, leaf in jax.tree.leaves_with_path(state.optimizer):
        if not leaf.ndim and not np.isfinite(leaf):
            raise ConfigError(
                f"the state of the optimizer begins with {dotted(path)}={leaf}; a checkpoint has finite numbers alone, "
                "so begin with a large one"
            )


def initial_state(run: Run, checkpoints: Checkpoints, record: dict | None):
    """Restore the state of a checkpoint as `checkpoint.restore` says; without a record, initialize it.

    If `train.init_from` is given, it initializes the parameters, except in a run with a frozen base. A line says so if
    that source has a module as the run trains it.
    """
    config, abstract = run.config, run.abstract_state
    if record is None:
        source = initial(config) if config.train.init_from else None
        if source and "base" not in run.abstract_frozen:
            return run.init(source.restore(abstract.params))
        objective = config.train.objective
        if source and not config.lora.rank and source.configuration().train.objective == objective:
            announce(
                f"the module that train.objective={objective} trains begins with random weights; of "
                f"train.init_from={source.name} the run takes the model alone"
            )
        return run.init()
    if "weights_only" in record:
        return run.init(checkpoints.restore_params(record["step"], abstract.params, "params"))
    if config.checkpoint.restore == "broadcast":
        return checkpoints.restore_by_broadcast(record["step"], abstract, run.mesh)
    return checkpoints.restore(record["step"], abstract)
