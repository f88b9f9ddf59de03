# SPDX-License-Identifier: Apache-2.0
"""Tasks of lm-evaluation-harness, on a model of this workspace.

The package `lm_eval` is the extra lm-eval; only this file imports it. It finds the data of a task where the task says:
on the Hugging Face hub, or in local files.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Sequence

import jinja2
from datasets.exceptions import DatasetGenerationError
from lm_eval import evaluator
from lm_eval.api.group import Group
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.api.task import Task
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from yaml import YAMLError

from configs.errors import ConfigError, did_you_mean, similar
from scoring.figures import Figure
from scoring.likelihood import LanguageModel, log_likelihoods
from scoring.texts import continue_greedily, row_of_pair, rows_of_text

BOOTSTRAPS = 1000  # draws for the standard error of a metric that is not a mean
UNREADABLE = (ConnectionError, FileNotFoundError, DatasetGenerationError)  # the data of a task
# What the harness raises for a definition of a task that it cannot use.
MISTAKES = (
    ArithmeticError, AttributeError, ImportError, LookupError, TypeError, ValueError, YAMLError, jinja2.TemplateError,
)  # fmt: skip


@register_model("torus")
class Torus(LM):
    """A model as the harness calls it; each request has its texts in `args`.

    All processes of a run call each method with the same requests and get the same answers.
    """

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def loglikelihood(self, requests) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether it is the greedy continuation) of each (context, continuation)."""
        return [
            tuple(one) for one in log_likelihoods(self.model, [row_of_pair(self.model, *one.args) for one in requests])
        ]

    def loglikelihood_rolling(self, requests) -> list[float]:
        """Return the log-likelihood of each text."""
        rows = [rows_of_text(self.model, *one.args) for one in requests]
        values = iter(log_likelihoods(self.model, [row for of_text in rows for row in of_text]))
        return [math.fsum(next(values).value for _ in of_text) for of_text in rows]

    def generate_until(self, requests) -> list[str]:
        """Return the greedy continuation of each (context, options); ConfigError for a task that samples."""
        prompts, options = zip(*((one.args[0], normalize_gen_kwargs(one.args[1])) for one in requests), strict=True)
        if any(option["do_sample"] and option.get("temperature", 1.0) > 0 for option in options):
            raise ConfigError("--tasks: a task asks for random draws (do_sample); only greedy decoding is scored")
        return continue_greedily(
            self.model, prompts, max_tokens=[option["max_gen_toks"] for option in options],
            stops=[option["until"] for option in options],
        )  # fmt: skip


class Asked(Exception):
    """A task asks for a text; whether its functions can read one depends on the text."""


class Constant(LM):
    """A model that gives every request the same log-likelihood."""

    def loglikelihood(self, requests) -> list[tuple[float, bool]]:
        """Return a log-likelihood for each request."""
        return [(-1.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests) -> list[float]:
        """Return a log-likelihood for each request."""
        return [-1.0] * len(requests)

    def generate_until(self, requests) -> list[str]:
        """Raise Asked: all requests are made."""
        raise Asked


def task_manager(names: Sequence[str], include_path: str) -> TaskManager:
    """Return the index of all tasks, or of the user's folder if it has all that are named.

    Raises:
      ConfigError: a task is unknown.
    """
    if include_path:
        users = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(users.all_tasks):
            return users
    every = TaskManager(include_path=include_path or None)
    if unknown := [name for name in names if name not in every.all_tasks]:
        near = did_you_mean(similar(unknown[0], every.all_tasks))
        own = (
            f", nor of a readable YAML file in {include_path}" if include_path else "; --include_path=FOLDER adds yours"
        )
        raise ConfigError(f"--tasks={unknown[0]} is not a task of lm-evaluation-harness{near or own}")
    return every


def check(names: Sequence[str], manager: TaskManager) -> None:
    """Make the requests of the first item of each task, and score constant log-likelihoods.

    Raises:
      ConfigError: the data of a task cannot be read, or its definition cannot be used.
    """
    for name in names:
        with _readable_data([name]), contextlib.suppress(Asked):
            try:
                _evaluate(Constant(), [name], manager, limit=1, bootstrap_iters=0)
            except MISTAKES as error:
                why = f"{type(error).__name__}: {' '.join(str(error).split())}"
                file = manager.task_index[name].yaml_path or "which has no file"
                raise ConfigError(f"--tasks={name}: its definition, {file}, cannot be used: {why}") from error


def read(names: Sequence[str], manager: TaskManager) -> dict[str, Task | Group]:
    """Return {name: the task or the group of tasks}, with its data.

    Raises:
      ConfigError: the data of a task cannot be read, it needs a package that is not installed, or it is named twice,
        as with its group.
    """
    try:
        with _readable_data(names):
            found = manager.load(list(names))
    except ImportError as error:
        raise ConfigError(f"--tasks={','.join(names)}: {error}; install what the task needs, or leave it out") from None
    except ValueError as error:
        if not str(error).startswith("Duplicate task"):
            raise
        raise ConfigError(f"--tasks={','.join(names)}: {error}; name one of them") from None
    members = {name for group in found["groups"].values() for name in group.child_names}
    return {name: one for name, one in (found["groups"] | found["tasks"]).items() if name not in members}


def score(
    model: LanguageModel, tasks: dict[str, Task | Group], manager: TaskManager, limit: int = 0
) -> tuple[list[dict], dict[str, dict[str, Figure]]]:
    """Return (the result of each item, {task: {metric: figure}}) of tasks of the harness.

    Args:
      tasks: as `read` returns them.
      limit: of the items of a task; 0: all.

    Raises:
      ConfigError: the data of a task cannot be read, or one asks for random draws.
    """
    with _readable_data(tasks):
        found = _evaluate(Torus(model), tasks.values(), manager, limit=limit or None, bootstrap_iters=BOOTSTRAPS)
    return _results(found["samples"]), {task: _figures(metrics) for task, metrics in found["results"].items()}


def _evaluate(model: LM, tasks: Iterable[str | Task | Group], manager: TaskManager, **how) -> dict:
    """Return what the harness finds for a model."""
    os.environ["DISABLE_MULTIPROC"] = "1"  # its bootstrap forks this process, which has threads of jax
    return evaluator.simple_evaluate(model, tasks=list(tasks), task_manager=manager, **how)


@contextlib.contextmanager
def _readable_data(names: Iterable[str]):
    """Raise ConfigError if the data of a task cannot be read."""
    try:
        yield
    except BrokenPipeError:  # of the output
        raise
    except UNREADABLE as error:
        why = error.__cause__ or error  # that of a malformed file
        raise ConfigError(f"--tasks={','.join(names)}: the data of a task cannot be read: {why}") from None


def _results(samples: dict[str, list[dict]]) -> list[dict]:
    """Return a result for each item and filter of the answers."""
    return [
        {"task": task, "item": one["doc_id"], "filter": one["filter"], "target": one["target"]}
        | {"answers": one["filtered_resps"]} | {name: one[name] for name in one["metrics"]}
        for task, of_task in samples.items() for one in json.loads(json.dumps(of_task, default=str))
    ]  # fmt: skip


def _figures(metrics: dict) -> dict[str, Figure]:
    """Return {metric: figure} of the keys "metric,filter"; the filter is left out where it is "none"."""
    found, counts = {}, metrics.get("sample_count", {})  # a group has a metric of those members that have it
    for key, value in metrics.items():
        name, _, chosen = key.partition(",")
        if chosen and not name.endswith("_stderr"):
            error = metrics.get(f"{name}_stderr,{chosen}")
            label = name if chosen == "none" else f"{name}/{chosen}"
            count = counts.get(key, metrics["sample_len"])
            found[label] = Figure(float(value), float(error) if isinstance(error, int | float) else math.nan, count)
    return found
