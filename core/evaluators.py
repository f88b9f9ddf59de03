# SPDX-License-Identifier: Apache-2.0
"""The interface of an evaluation during and after training, and those of every run: held-out loss and tasks.

A file of core/evaluations/ has `KIND`, the name of its evaluator, and `make(config, corpus)`, which returns the
evaluator, or None if the configuration does not ask for it. `make` raises ConfigError if it cannot be evaluated, also
because `corpus` is None, as in a run on batches of the caller. Such a run has only the evaluators that it is given.
"""

import dataclasses
import numbers
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from checkpointing import frozen_models
from checkpointing.checkpoints import Checkpoints
from checkpointing.source_run import newest_checkpoint, restore_eval_params
from checkpointing.store import Store
from cluster import processes
from configs.errors import ConfigError, check_returned, made_by, modules_of
from core.assembly import Run, assemble
from core.evaluation import Progress, evaluate_heldout, heldout_lines
from core.scored_model import check_same_on_hosts, scored_model
from files.json_reader import JsonError
from inference.engine import Engine
from input_pipeline.batches import OnLost
from input_pipeline.corpus import Corpus
from parallelism.mesh import mesh_context
from reporting.display import Display
from reporting.metrics import RESERVED, read_lines, without_abandoned
from reporting.step_log import StepLog
from scoring import figures as scores
from scoring import questions, tasks

FOLDER = "core.evaluations"
OWN_KINDS = ("train", "event")  # kinds of lines of every run


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
      progress: called with the number of batches that are done, and of all.
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
    progress: Progress | None = None

    @property
    def engine(self) -> Engine:
        """The engine that decodes with `params`."""
        return engine_of(self.run.dropless(), self.params)


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

        A figure is a number, or an array with one element. RESERVED are not names of figures.
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
        result = evaluate_heldout(context, None if context.is_last else self.num_batches)
        return result and result[0] | {"tokens": result[1]}

    def report(self, log, step, figures):
        log.evaluation(step, *_split(figures))

    def lines(self, context, figures):
        return heldout_lines(context.run, *_split(figures), context.corpus)


def _split(figures: dict) -> tuple[dict, int]:
    """Return the figures of `HeldOut` without `tokens`, and `tokens`."""
    return {name: figure for name, figure in figures.items() if name != "tokens"}, figures["tokens"]


def check_names(evaluators: Sequence[Evaluator]) -> None:
    """Raise ValueError if an evaluator of a caller has no name, or one whose lines would mix with others.

    Raises TypeError if its `every` is not a whole number.
    """
    taken = {*OWN_KINDS, HeldOut.name, Tasks.name, *(module.KIND for module in modules_of(FOLDER))}
    for evaluator in evaluators:
        name = evaluator.name
        if not isinstance(name, str) or not name or name in taken:
            raise ValueError(
                f"{type(evaluator).__name__}.name={name!r}: give each evaluator a name of its own, other than "
                f"{', '.join(sorted(taken))}"
            )
        if not isinstance(evaluator.every, numbers.Integral):
            raise TypeError(
                f"{type(evaluator).__name__}.every={evaluator.every!r} must be a whole number of steps; 0: only at the "
                "end"
            )
        taken.add(name)


def without_figures(
    due: Sequence[Evaluator], evaluators: Sequence[Evaluator], workdir: pathlib.Path, record: dict,
    losses: Mapping[int, float],
) -> list[Evaluator]:  # fmt: skip
    """Return the evaluators whose figures a resumed run lacks.

    They are those `due` at the step of its record that metrics.jsonl lacks, and one that ranks if `losses` lack its
    own: a run that finished there saved its last state before it evaluated it. The result is the same in all processes;
    process 0 reads the file. If that cannot be read, all are evaluated again.
    """
    path, step = workdir / "metrics.jsonl", record["step"]
    if record["config"].get("train.steps") == step:
        due = [one for one in evaluators if one in due or one.ranks_checkpoints]

    def kinds() -> list[str]:
        try:
            lines = without_abandoned(read_lines(path))
        except (JsonError, OSError):
            return []
        return sorted({line["kind"] for line in lines if line.get("step") == step})

    done = processes.shared(f"evaluated {step}", kinds) if due else []
    return [one for one in due if one.name not in done or (one.ranks_checkpoints and step not in losses)]


def as_numbers(evaluator: Evaluator, figures: dict) -> dict[str, float]:
    """Return figures that metrics.jsonl can hold; TypeError or ValueError for others, with their evaluator."""
    if not isinstance(figures, Mapping) or not all(isinstance(name, str) for name in figures):
        raise TypeError(f"evaluator {evaluator.name}: evaluate() returned {figures!r:.60}; return {{name: number}}")
    if evaluator.ranks_checkpoints and "loss" not in figures:
        raise ValueError(f'evaluator {evaluator.name}: ranks_checkpoints needs a figure "loss"')
    numbers = {}
    for name, value in figures.items():
        array = np.asarray(value)
        if name in RESERVED:
            raise ValueError(
                f"evaluator {evaluator.name}: a line of metrics.jsonl has its own {name!r}; rename the figure"
            )
        if array.size != 1 or array.dtype.kind in "OSUMmc":
            raise TypeError(f"evaluator {evaluator.name}: figure {name!r} is {value!r}; it must be one number")
        numbers[name] = array.item() if array.dtype.kind in "iub" else float(array.item())
    return numbers


def lines_of(evaluator: Evaluator, context: EvaluationContext, figures: dict[str, float]) -> list[str]:
    """Return the lines of an evaluator for the summary; TypeError, which names it, if they are not lines."""
    found = evaluator.lines(context, figures)
    lines = list(found) if isinstance(found, Iterable) and not isinstance(found, str) else [None]
    is_right = all(isinstance(line, str) for line in lines)
    check_returned(f"evaluator {evaluator.name}: lines()", found, is_right, "a list of texts")
    return lines


class _Stopped(Exception):
    """All processes stop before the next batch."""


class Tasks(Evaluator):
    """The metrics of the user's tasks, see scoring/tasks.py."""

    name = "tasks"

    def __init__(self, every: int, items: list[questions.Item]):
        self.every, self.items = every, items

    def evaluate(self, context):
        """Return {task/metric: value}, and {task/metric_stderr: standard error}."""

        def on_batch(what: str, done: int, total: int) -> None:
            if context.stop():
                raise _Stopped

        run, tokenizer = context.run.dropless(), context.corpus.tokenizer
        model = scored_model(run, context.params, tokenizer, on_batch, is_trained=context.step > 0)
        try:
            return scores.flat(tasks.figures_of(tasks.score(model, self.items)))
        except _Stopped:
            return None

    def lines(self, context, figures):
        return scores.lines(figures)


def task_items(config) -> list[questions.Item]:
    """Return the items of `evaluation.tasks`, which must be equal on all hosts.

    Raises ConfigError or JsonError for a file that cannot be read or scored.
    """
    paths = [path.strip() for path in config.evaluation.tasks.split(",") if path.strip()]
    items = questions.read_files(paths, "evaluation.tasks")
    check_same_on_hosts(items, "the items of evaluation.tasks")
    return items


def check_without_corpus(config) -> None:
    """Raise ConfigError if the configuration asks for what batches of the caller do not permit."""
    for key, epochs in (
        ("train.epochs", config.train.epochs), ("evaluation.every_epochs", config.evaluation.every_epochs),
    ):  # fmt: skip
        if epochs:
            raise ConfigError(f"{key}={epochs}: batches of the caller have no epochs; set it to 0, and count in steps")
    if config.evaluation.tasks:
        raise ConfigError(
            f"evaluation.tasks={config.evaluation.tasks}: a run on batches of the caller has no tokenizer; leave it out"
        )
    for module in modules_of(FOLDER):
        module.make(config, None)


def of_run(
    config, corpus: Corpus | None, items: list[questions.Item], given: Sequence[Evaluator]
) -> list[Evaluator]:  # fmt: skip
    """Return the evaluators of a run's corpus, if it has one, and those of a caller.

    Raises ValueError if several rank the checkpoints, since their losses do not compare; else as `of_corpus`.
    """
    evaluators = [*(of_corpus(config, corpus, items) if corpus else []), *given]
    names = [evaluator.name for evaluator in evaluators if evaluator.ranks_checkpoints]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} rank the checkpoints; give {names[-1]} ranks_checkpoints=False")
    return evaluators


def of_corpus(config, corpus: Corpus, items: list[questions.Item]) -> list[Evaluator]:
    """Return the evaluators of a run with these `task_items`; ConfigError if one cannot evaluate what it was given."""
    if items:
        tasks.check_lengths(items, corpus.tokenizer, config.model.max_length, "evaluation.tasks")
    of_tasks = [Tasks(config.evaluation.tasks_every, items)] if items else []
    return [
        HeldOut(config.train.eval_every, config.evaluation.batches),
        *of_tasks,
        *made_by(modules_of(FOLDER), Evaluator, config, corpus),
    ]


def evaluate_newest(config, workdir: pathlib.Path, address, corpus: Corpus, store: Store | None = None) -> None:
    """Print the loss of the newest checkpoint on all held-out documents of a corpus, and the results of votes.

    Votes are saved in `workdir`; votes on other puzzles than the run's own are saved in a separate folder. The
    checkpoints are at `address`, which may be in a bucket, or in `store` if it is given. Raises ConfigError if a host
    has different data.
    """
    processes.check_same({"digest": corpus.digest}, "their corpus")  # else one would wait for batches of another
    run, lines = assemble(config), []
    display = Display(config.train.steps, quiet=processes.index() > 0)
    with Checkpoints(address, store=store) as checkpoints, mesh_context(run.mesh), display:
        display.phase("restoring the checkpoint")
        step = newest_checkpoint(checkpoints, config)
        params = restore_eval_params(checkpoints, step, run.abstract_params)
        record = checkpoints.record(step)
        frozen = frozen_models.weights(run, frozen_models.references(run, record))
        display.phase("evaluating all that is held out")
        is_own = record.get("corpus") in (None, corpus.digest)
        if not is_own and config.model.puzzle_dim and corpus.heldout.num_identifiers > 1:
            lines.append(
                "Note: these are not the run's own puzzles; they are answered with rows of its puzzle table "
                "that were trained for others"
            )
        folder = workdir if is_own or not corpus.heldout.test_puzzles else workdir / "evaluated" / corpus.digest[:12]
        context = EvaluationContext(run, params, frozen, corpus, folder, step, progress=display.evaluated)
        for evaluator in of_corpus(config, corpus, task_items(config)):
            lines += lines_of(evaluator, context, evaluator.evaluate(context))
    if processes.index() == 0:
        print("\n".join([f"checkpoint: {address}/checkpoints/{step}", *lines]))
