# SPDX-License-Identifier: Apache-2.0
"""The interface of an evaluation during and after training, and those of every run: held-out loss, votes, tasks."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from causality import explanation, page
from checkpointing import frozen_models
from checkpointing.checkpoints import Checkpoints
from checkpointing.source_run import newest_checkpoint, restore_eval_params
from cluster import processes
from configs.errors import ConfigError
from core import effective_rank
from core.assembly import Run, assemble
from core.evaluation import evaluate_heldout, heldout_batches, heldout_lines, vote_and_keep, vote_lines
from core.scored_model import check_same_on_hosts, scored_model
from files.atomic import write_atomically
from inference.engine import Engine
from input_pipeline.batches import OnLost
from input_pipeline.corpus import Corpus
from parallelism.mesh import mesh_context
from reporting.step_log import StepLog
from scoring import figures as scores
from scoring import questions, tasks

OWN_KINDS = ("train", "event")  # kinds of lines of every run
OF_A_LINE = ("kind", "step", "time")  # keys of every line


def engine_of(run: Run, params: dict) -> Engine:
    """Return the engine that decodes with parameters of a run, all of them."""
    return Engine(run.graph, params, run.config.model.max_length, run.config.inference.cache_dtype)


@dataclasses.dataclass(frozen=True)
class EvaluationContext:
    """What an evaluator may use; the mesh of `run` is in context.

    Attributes:
      params: all parameters of the trained model: its average if there is one, with the frozen base.
      frozen: frozen parameters by role.
      corpus: None if the run trains on a caller's batches.
      step: number of steps done.
      is_last: whether this is the evaluation after the last step.
      stop: returns whether to stop, the same in all processes. Call it before each batch, since it reports progress.
      on_lost: called if a batch cannot be read; an empty batch takes its place. None: the error is raised.
    """

    run: Run
    params: dict
    frozen: dict
    corpus: Corpus | None
    workdir: pathlib.Path
    step: int
    is_last: bool = True
    stop: Callable[[], bool] = lambda: False
    on_lost: OnLost | None = None

    @property
    def engine(self) -> Engine:
        """The engine that decodes with `params`."""
        return engine_of(self.run, self.params)


class Evaluator:
    """Every process of a run calls it, at the same steps.

    Attributes:
      name: kind of its lines in metrics.jsonl. It differs from those of a run's own lines and of other evaluators.
      every: steps from one evaluation to the next; it always runs after the last step. 0: only then.
      ranks_checkpoints: whether `checkpoint.keep_best` compares its figure "loss".
    """

    name = ""
    every = 0
    ranks_checkpoints = False

    def evaluate(self, context: EvaluationContext) -> dict[str, float] | None:
        """Return figures by name, the same in all processes; None if `context.stop` said so.

        A figure is a number, or an array with one element. OF_A_LINE are not names of figures.
        """
        raise NotImplementedError

    def report(self, log: StepLog, step: int, figures: dict[str, float]) -> None:
        """Write the figures to metrics.jsonl, if there are any."""
        if figures:
            log.writer.write(self.name, step=step, **figures)

    def lines(self, context: EvaluationContext, figures: dict[str, float]) -> list[str]:
        """Return the lines of the summary at the end of the run."""
        return []


class HeldOut(Evaluator):
    """The objective's metrics on held-out documents; on all of them after the last step."""

    name = "eval"
    ranks_checkpoints = True

    def __init__(self, every: int, num_batches: int | None):
        """Evaluate on `num_batches` global batches during training; None: on all documents."""
        self.every, self.num_batches = every, num_batches

    def evaluate(self, context):
        """Return the means of the objective's scalars, and `tokens`, the weight of the loss."""
        result = evaluate_heldout(
            context.run, context.params, context.corpus, context.stop,
            None if context.is_last else self.num_batches, context.frozen, context.on_lost,
        )  # fmt: skip
        return result and result[0] | {"tokens": result[1]}

    def report(self, log, step, figures):
        """Write and show the metrics."""
        figures = dict(figures)
        log.evaluation(step, figures, figures.pop("tokens"))

    def lines(self, context, figures):
        """Return the metrics in words."""
        figures = dict(figures)
        return heldout_lines(context.run, figures, figures.pop("tokens"), context.corpus)


class Votes(Evaluator):
    """The results of votes on the held-out puzzles, after the last step."""

    name = "votes"

    def evaluate(self, context):
        """Return the share of solved tasks by number of answers; {} if the data has no votes."""
        return vote_and_keep(
            context.run, context.params, context.corpus, context.workdir, context.step, on_batch=context.stop
        )

    def lines(self, context, figures):
        """Return the results in words."""
        return vote_lines(figures, context.corpus)


def check_names(evaluators: Sequence[Evaluator]) -> None:
    """Raise ValueError if an evaluator of a caller has no name, or one whose lines would mix with others."""
    taken = {*OWN_KINDS, HeldOut.name, Votes.name, Tasks.name, EffectiveRank.name, StreamTasks.name, CausalAnalysis.name}
    for evaluator in evaluators:
        name = evaluator.name
        if not isinstance(name, str) or not name or name in taken:
            raise ValueError(
                f"{type(evaluator).__name__}.name={name!r}: give each evaluator a name of its own, which is none of "
                f"{', '.join(sorted(taken))}"
            )
        taken.add(name)


def as_numbers(evaluator: Evaluator, figures: dict) -> dict[str, float]:
    """Return figures that metrics.jsonl can hold; TypeError or ValueError for others, with their evaluator."""
    if evaluator.ranks_checkpoints and "loss" not in figures:
        raise ValueError(f'evaluator {evaluator.name}: ranks_checkpoints needs a figure "loss"')
    numbers = {}
    for name, value in figures.items():
        array = np.asarray(value)
        if name in OF_A_LINE:
            raise ValueError(f"evaluator {evaluator.name}: each line has its own {name!r}; rename the figure")
        if array.size != 1 or array.dtype.kind in "OSUMm":
            raise TypeError(f"evaluator {evaluator.name}: figure {name!r} is {value!r}; it must be one number")
        numbers[name] = array.item() if array.dtype.kind in "iub" else float(array.item())
    return numbers


class _Stopped(Exception):
    """All processes stop before the next batch."""


class Tasks(Evaluator):
    """The metrics of the user's tasks, see scoring/tasks.py."""

    name = "tasks"

    def __init__(self, every: int, items: list[questions.Item]):
        """Score these items every so many steps."""
        self.every, self.items = every, items

    def evaluate(self, context):
        """Return {task/metric: value}, and {task/metric_stderr: standard error}."""

        def on_batch(what: str, done: int, total: int) -> None:
            if context.stop():
                raise _Stopped

        model = scored_model(context.run, context.params, context.corpus.tokenizer, on_batch)
        try:
            return scores.flat(tasks.figures_of(tasks.score(model, self.items)))
        except _Stopped:
            return None

    def lines(self, context, figures):
        """Return a line for each metric."""
        return scores.lines(figures)


class StreamTasks(Evaluator):
    """The objective's metrics on the held-out data of each task of `data.stream`, earlier and later ones too."""

    name = "stream"

    def __init__(self, every: int, num_batches: int):
        """Evaluate on `num_batches` global batches of each task."""
        self.every, self.num_batches = every, num_batches

    def evaluate(self, context):
        """Return {path of the task/metric: mean}."""
        found, corpus = {}, context.corpus
        for path, heldout in zip(corpus.names, corpus.tasks, strict=True):
            result = evaluate_heldout(
                context.run, context.params, dataclasses.replace(corpus, heldout=heldout), context.stop,
                self.num_batches, context.frozen, context.on_lost,
            )  # fmt: skip
            if result is None:
                return None
            found |= {f"{path}/{metric}": mean for metric, mean in result[0].items()}
        return found

    def lines(self, context, figures):
        """Return a line for each figure."""
        return [f"task {name}: {figure:.4f}" for name, figure in figures.items()]


class EffectiveRank(Evaluator):
    """The effective rank of the hidden units of each layer on a held-out batch, see core/effective_rank.py."""

    name = "plasticity"

    def __init__(self, every: int):
        """Measure every so many steps."""
        self.every = every

    def evaluate(self, context):
        """Return `effective_rank`, the mean over layers, and `smallest_effective_rank`."""
        if context.stop():
            return None
        batch = next(heldout_batches(context.run, context.corpus, 1, context.on_lost))
        ranks_L = effective_rank.of_batch(context.run, context.params, batch)
        return {"effective_rank": ranks_L.mean(), "smallest_effective_rank": ranks_L.min()}


class CausalAnalysis(Evaluator):
    """Which activations carry what distinguishes `causality.prompt` from `causality.corrupt`; see causality/."""

    name = "causality"

    def __init__(self, every: int, prompts: tuple[np.ndarray, np.ndarray]):
        """Explain these two prompts, int32 [T], every so many steps."""
        self.every, self.prompts = every, prompts

    def evaluate(self, context):
        """Return `explanation.figures`; write the heat maps to `workdir`/causes.html."""
        if context.stop():
            return None
        run, decode = context.run, context.corpus.tokenizer.decode
        found = explanation.explain(run.graph, context.params, *self.prompts, decode)
        if processes.index() == 0:
            text = page.page(found, f"Causal analysis at step {context.step:,}")
            write_atomically(context.workdir / "causes.html", text.encode())
        return explanation.figures(found)

    def lines(self, context, figures):
        """Return the head that restores most."""
        layer, head, effect = (figures[f"heads/{name}"] for name in ("layer", "head", "effect"))
        line = f"causality: head {head} of layer {layer} restores {effect:.3f} of the difference between the prompts"
        return [f"{line}; {context.workdir}/causes.html"]


def explained_prompts(config, tokenizer) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the tokens of the prompts of `causality`, None without; ConfigError if they cannot be compared."""
    names = "causality.prompt", "causality.corrupt"
    texts = config.causality.prompt, config.causality.corrupt
    return explanation.prompt_tokens(tokenizer, *texts, config.model.max_length, names) if texts[0] else None


def task_items(config) -> list[questions.Item]:
    """Return the items of `evaluation.tasks`, which must be equal on all hosts.

    Raises ConfigError or JsonError for a file that cannot be read or scored.
    """
    paths = [path.strip() for path in config.evaluation.tasks.split(",") if path.strip()]
    items = questions.read_files(paths, "evaluation.tasks")
    check_same_on_hosts(items, "the items of evaluation.tasks")
    return items


def check_tasks(config, *, has_corpus: bool) -> None:
    """Raise ConfigError or JsonError if `evaluation.tasks` or `causality.prompt` cannot be evaluated in this run."""
    if config.evaluation.tasks and not has_corpus:
        raise ConfigError(
            f"evaluation.tasks={config.evaluation.tasks}: a run on batches of the caller has no tokenizer; leave it out"
        )
    if config.causality.prompt and not has_corpus:
        raise ConfigError(
            f"causality.prompt={config.causality.prompt}: a run on batches of the caller has no tokenizer; leave it out"
        )
    task_items(config)


def of_corpus(config, corpus: Corpus | None) -> list[Evaluator]:
    """Return the evaluators that every run with a corpus has."""
    if corpus is None:
        return []
    items = task_items(config)
    of_tasks = [Tasks(config.evaluation.tasks_every, items)] if items else []
    every, batches = config.train.eval_every, config.evaluation.batches
    of_units = [EffectiveRank(config.plasticity.measure)] if config.plasticity.measure else []
    of_stream = [StreamTasks(every, batches)] if corpus.tasks else []
    prompts = explained_prompts(config, corpus.tokenizer)
    causal = [CausalAnalysis(config.causality.every, prompts)] if prompts else []
    return [HeldOut(every, batches), Votes(), *of_tasks, *of_units, *of_stream, *causal]


def evaluate_newest(config, workdir: pathlib.Path, address, corpus: Corpus) -> None:
    """Print the loss of the newest checkpoint on all held-out documents of a corpus, and the results of votes.

    Votes are saved in `workdir`. `address` is that of the checkpoints, which may be in a bucket.
    """
    run, lines = assemble(config), []
    with Checkpoints(address) as checkpoints, mesh_context(run.mesh):
        step = newest_checkpoint(checkpoints, config)
        params = restore_eval_params(checkpoints, step, run.abstract_state.params)
        frozen, _ = frozen_models.weights(run, checkpoints.record(step))
        context = EvaluationContext(run, params, frozen, corpus, workdir, step)
        for evaluator in of_corpus(config, corpus):
            lines += evaluator.lines(context, evaluator.evaluate(context))
    if processes.index() == 0:
        print("\n".join([f"checkpoint: {address}/checkpoints/{step}", *lines]))
