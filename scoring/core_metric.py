# SPDX-License-Identifier: Apache-2.0
"""CORE, the metric of DCLM (arXiv:2406.11794, section 3.5): the mean of centred accuracies.

A folder has `core.yaml` (the list of tasks), `eval_meta_data.csv` (their random baselines in percent) and `eval_data/`
(a JSON object per line). An accuracy is centred as (accuracy - baseline) / (1 - baseline). Items are scored as nanochat
does:

- multiple_choice: the choice of the lowest mean loss per token is chosen; its tokens are those after the beginning that
  the prompts of all choices share;
- schema: the same for several contexts with one continuation, whose tokens are the end that all prompts share;
- language_modeling: the continuation must be the greedy one, token for token.

The items of a file are shuffled with a fixed seed; the examples before an item are drawn with its number as seed.
"""

import collections
import csv
import dataclasses
import io
import json
import math
import pathlib
import random
from collections.abc import Sequence
from typing import Annotated, Literal, NotRequired

import numpy as np
import pydantic

from configs.errors import ConfigError
from files.json_reader import JsonError, Object, parse_json
from files.yaml_reader import parse_yaml
from reporting.display import counted
from scoring import figures
from scoring.figures import Figure
from scoring.likelihood import LanguageModel, Likelihood, Row, log_likelihoods

MOST_BYTES = 1 << 30  # of a file of items
ORDER_SEED, EXAMPLES_SEED = 1337, 1234  # of nanochat
Index = Annotated[int, pydantic.Field(ge=0)]
Options = Annotated[list[str], pydantic.Field(min_length=2)]


class TaskOfCore(Object):
    """An entry of core.yaml."""

    label: str
    icl_task_type: Literal["multiple_choice", "schema", "language_modeling"]
    dataset_uri: str
    num_fewshot: Annotated[list[Index], pydantic.Field(min_length=1)]
    continuation_delimiter: NotRequired[str]


class TasksOfCore(Object):
    """The content of core.yaml."""

    icl_tasks: Annotated[list[TaskOfCore], pydantic.Field(min_length=1)]


class Choice(Object):
    """An item of multiple_choice."""

    query: str
    choices: Options
    gold: Index


class Schema(Object):
    """An item of schema."""

    context_options: Options
    continuation: str
    gold: Index


class Continuation(Object):
    """An item of language_modeling."""

    context: str
    continuation: str


ITEMS = {"multiple_choice": Choice, "schema": Schema, "language_modeling": Continuation}


@dataclasses.dataclass(frozen=True)
class CoreTask:
    """A task with its items in the order in which they are scored; `baseline` is the accuracy of chance."""

    label: str
    kind: str
    num_examples: int
    delimiter: str
    baseline: float
    items: list[dict]


def read_folder(folder: pathlib.Path, limit: int = 0) -> list[CoreTask]:
    """Return the tasks of a folder, each with at most `limit` items, 0 for all.

    Raises ConfigError or JsonError, with the file and line, for what cannot be read or scored.
    """
    tasks, baselines = _tasks(folder / "core.yaml"), _baselines(folder / "eval_meta_data.csv")
    found = []
    for task in tasks:
        label, count = task["label"], task["num_fewshot"][0]
        if label not in baselines:
            raise ConfigError(f"{folder / 'eval_meta_data.csv'} has no random baseline of {label}; add its row")
        path = folder / "eval_data" / task["dataset_uri"]
        items = _items(path, ITEMS[task["icl_task_type"]])
        random.Random(ORDER_SEED).shuffle(items)
        has, items = len(items), items[: limit or None]
        if has <= count:
            raise ConfigError(
                f"{path} has {counted(has, 'item')}, too few for {counted(count, 'example')} of {label} before each; "
                f"it needs at least {counted(count + 1, 'item')}"
            )
        if len(items) <= count:
            raise ConfigError(
                f"--limit={limit} is too small for {counted(count, 'example')} of {label} before each item; "
                f"type at least {count + 1}"
            )
        delimiter = task.get("continuation_delimiter", " ")
        found.append(CoreTask(label, task["icl_task_type"], count, delimiter, baselines[label], items))
    return found


def _content(path: pathlib.Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"--core: {path}: {error.strerror}; name a folder with core.yaml, eval_meta_data.csv and eval_data"
        ) from None
    if len(content) > MOST_BYTES:
        raise ConfigError(f"--core: {path} is larger than {MOST_BYTES:,} bytes")
    return content


def _tasks(path: pathlib.Path) -> list[dict]:
    """Return the entries of core.yaml; JsonError if it is not a YAML list of them, ConfigError if labels are equal."""
    text = json.dumps(parse_yaml(_content(path), str(path)), default=str)
    tasks = parse_json(text, TasksOfCore, str(path))["icl_tasks"]
    label, count = collections.Counter(task["label"] for task in tasks).most_common(1)[0]
    if count > 1:  # labels distinguish the results
        raise ConfigError(f"{path} has {count} tasks with the label {label}; give each its own")
    return tasks


def _baselines(path: pathlib.Path) -> dict[str, float]:
    """Return the accuracy of chance of each task, at least 0 and less than 1."""
    found = {}
    try:
        for row in csv.DictReader(io.StringIO(_content(path).decode("utf-8-sig"))):
            found[row["Eval Task"]] = float(row["Random baseline"]) / 100
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ConfigError(
            f"{path}: its columns Eval Task and Random baseline cannot be read ({error}); a baseline is in percent"
        ) from None
    if wrong := next((label for label, value in found.items() if not 0 <= value < 1), None):
        raise ConfigError(f"{path}: the random baseline of {wrong} is not a percentage of 0 or more and less than 100")
    return found


def _items(path: pathlib.Path, schema: type) -> list[dict]:
    found = []
    for number, line in enumerate(_content(path).split(b"\n"), start=1):
        if line.strip():
            item = parse_json(line, schema, f"{path}, line {number}")
            options = item.get("choices") or item.get("context_options") or []
            if options and item["gold"] >= len(options):
                raise JsonError(f"{path}, line {number}: gold={item['gold']} is not the index of an option")
            found.append(item | {"line": number})
    return found


def check_lengths(model: LanguageModel, tasks: Sequence[CoreTask]) -> None:
    """Raise ConfigError if a continuation is longer than the model's texts, before anything is scored."""
    for task in tasks:
        alone = dataclasses.replace(task, num_examples=0)  # examples before it change no continuation
        for number, item in enumerate(task.items):
            length = max(len(row.continuation) for row in rows_of_item(model, alone, number))
            if length > model.max_length:
                raise ConfigError(
                    f"--core: line {item['line']} of {task.label} has a continuation of {length} tokens, more than "
                    f"model.max_length={model.max_length}; shorten it"
                )


def score(model: LanguageModel, tasks: Sequence[CoreTask]) -> list[dict]:
    """Return the result of each item of all tasks, for the file of results; the same in all processes."""
    check_lengths(model, tasks)
    found = []
    for task in tasks:
        named = dataclasses.replace(model, on_batch=lambda _, *batch, label=task.label: model.on_batch(label, *batch))
        rows = [rows_of_item(model, task, number) for number in range(len(task.items))]
        likelihoods = iter(log_likelihoods(named, [row for of_item in rows for row in of_item]))
        for item, of_item in zip(task.items, rows, strict=True):
            own = [next(likelihoods) for _ in of_item]
            found.append({"task": task.label, "line": item["line"]} | _result(task, item, of_item, own))
    return found


def _result(task: CoreTask, item: dict, rows: Sequence[Row], likelihoods: Sequence[Likelihood]) -> dict:
    if task.kind == "language_modeling":
        return {"log_likelihood": likelihoods[0].value, "acc": int(likelihoods[0].is_greedy)}
    means = [one.value / len(row.continuation) for row, one in zip(rows, likelihoods, strict=True)]
    chosen = means.index(max(means))
    return {"mean_log_likelihoods": means, "chosen": chosen, "answer": item["gold"], "acc": int(chosen == item["gold"])}


def rows_of_item(model: LanguageModel, task: CoreTask, number: int) -> list[Row]:
    """Return the rows to score of the item with this number."""
    item, before = task.items[number], examples(task, number)
    if task.kind == "multiple_choice":
        prompts = [before + item["query"] + task.delimiter + choice for choice in item["choices"]]
    elif task.kind == "schema":
        prompts = [before + context + task.delimiter + item["continuation"] for context in item["context_options"]]
    else:
        context = before + item["context"].strip() + task.delimiter
        prompts = [context.strip(), context + item["continuation"]]
    tokens = [
        np.array([*(model.prefix or [model.start]), *model.tokenizer.encode(prompt)], np.int32) for prompt in prompts
    ]
    if task.kind == "schema":
        end = _shared([one[::-1] for one in tokens])
        splits = [max(1, len(one) - end) for one in tokens]
    else:
        tokens, beginning = (tokens if task.kind == "multiple_choice" else tokens[1:]), _shared(tokens)
        splits = [max(1, min(beginning, len(one) - 1)) for one in tokens]
    return [Row(one[:split], one[split:]) for one, split in zip(tokens, splits, strict=True)]


def examples(task: CoreTask, number: int) -> str:
    """Return the text before an item: other items with their answers, each with an empty line after it."""
    others = [other for other in range(len(task.items)) if other != number] if task.num_examples else []
    drawn = random.Random(EXAMPLES_SEED + number).sample(others, task.num_examples)
    return "".join(f"{_solved(task, task.items[other])}\n\n" for other in drawn)


def _solved(task: CoreTask, item: dict) -> str:
    if task.kind == "multiple_choice":
        return item["query"] + task.delimiter + item["choices"][item["gold"]]
    context = item["context_options"][item["gold"]] if task.kind == "schema" else item["context"].strip()
    return context + task.delimiter + item["continuation"]


def _shared(sequences: Sequence[np.ndarray]) -> int:
    """Return the number of tokens at the beginning of all sequences."""
    shortest = min(map(len, sequences))
    same = np.all([one[:shortest] == sequences[0][:shortest] for one in sequences], axis=0)
    return shortest if same.all() else int(same.argmin())


def figures_of(tasks: Sequence[CoreTask], results: Sequence[dict]) -> dict[str, dict[str, Figure]]:
    """Return {task: {metric: figure}} with the accuracy `acc` and `acc_centered` of each task, and `core` of CORE.

    The standard error of CORE takes the tasks as fixed and their items as drawn.
    """
    found = {}
    for task in tasks:
        accuracy = figures.mean([result["acc"] for result in results if result["task"] == task.label])
        found[task.label] = {"acc": accuracy, "acc_centered": centered(accuracy, task.baseline)}
    every = [metrics["acc_centered"] for metrics in found.values()]
    error = math.sqrt(math.fsum(figure.error**2 for figure in every)) / len(every)
    mean = math.fsum(figure.value for figure in every) / len(every)
    return found | {"CORE": {"core": Figure(mean, error, sum(figure.count for figure in every))}}


def centered(accuracy: Figure, baseline: float) -> Figure:
    """Return (accuracy - baseline) / (1 - baseline): 0 by chance, 1 without mistakes."""
    return Figure((accuracy.value - baseline) / (1 - baseline), accuracy.error / (1 - baseline), accuracy.count)
