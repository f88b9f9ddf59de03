# SPDX-License-Identifier: Apache-2.0
"""CORE is the mean of centred accuracies, by prompts with examples, of tasks that are made here."""

import json
import math

import numpy as np
import pytest

from configs.errors import ConfigError
from files.json_reader import JsonError
from input_pipeline.tokenization import ByteTokenizer
from scoring import core_metric
from scoring.core_metric import CoreTask, centered, check_lengths, examples, figures_of, read_folder, rows_of_item
from scoring.figures import Figure
from scoring.likelihood import LanguageModel, Likelihood
from tests.scoring.test_texts import END, stand_in

YAML = """
icl_tasks:
-
  label: choose
  dataset_uri: world/choose.jsonl
  num_fewshot: [2]
  icl_task_type: multiple_choice
  continuation_delimiter: "\\nAnswer: "
-
  label: complete
  dataset_uri: complete.jsonl
  num_fewshot: [0]
  icl_task_type: language_modeling
-
  label: resolve
  dataset_uri: resolve.jsonl
  num_fewshot: [0]
  icl_task_type: schema
"""
CSV = "Eval Task,Task Category,Random baseline\nchoose,a,25\ncomplete,b,0\nresolve,c,50\nunused,d,10\n"
CHOICES = [{"query": f"q{n}", "choices": ["one", "only", "two"], "gold": n % 3} for n in range(4)]
TEXTS = [{"context": "a b ", "continuation": "c d"}, {"context": "e", "continuation": "f"}]
OPTIONS = [{"context_options": ["the cat", "a dog"], "continuation": "ran off", "gold": 1}]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "eval_data" / "world").mkdir(parents=True)
    (tmp_path / "core.yaml").write_text(YAML)
    (tmp_path / "eval_meta_data.csv").write_text(CSV)
    for name, items in (("world/choose", CHOICES), ("complete", TEXTS), ("resolve", OPTIONS)):
        (tmp_path / "eval_data" / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return tmp_path


def test_a_folder_is_read_with_its_baselines_and_an_order_that_stays(folder):
    tasks = read_folder(folder)
    assert [(task.label, task.kind, task.num_examples, task.baseline) for task in tasks] == [
        ("choose", "multiple_choice", 2, 0.25), ("complete", "language_modeling", 0, 0.0),
        ("resolve", "schema", 0, 0.5),
    ]  # fmt: skip
    assert sorted(item["line"] for item in tasks[0].items) == [1, 2, 3, 4]
    assert tasks == read_folder(folder)
    assert read_folder(folder, limit=3)[0].items == tasks[0].items[:3]


def test_a_continuation_that_does_not_fit_is_named_before_anything_is_scored(folder):
    model, (choose, complete, resolve) = stand_in(ByteTokenizer(), 64), read_folder(folder)
    check_lengths(model, [choose, complete, resolve])
    choose.items[0]["choices"] = ["x" * 65 + "a", "x" * 65 + "b"]
    check_lengths(model, [choose])
    complete.items[1]["continuation"] = "x" * 64  # and the space before it
    resolve.items[0]["context_options"] = ["the " + "x" * 60, "a " + "x" * 60]  # which end alike
    for task, length in ((complete, 65), (resolve, 69)):
        with pytest.raises(ConfigError, match=rf"^--core: line \d+ of {task.label} has a continuation of {length} tok"):
            check_lengths(model, [task])


def tokens(text: str) -> list[int]:
    return [END, *text.encode()]


def check(row, whole: str, scored: str) -> None:
    assert [*row.context, *row.continuation] == tokens(whole)
    assert bytes(row.continuation.tolist()).decode() == scored


def test_the_scored_tokens_are_those_in_which_the_prompts_differ(folder):
    choose, complete, resolve = read_folder(folder)
    model = stand_in(ByteTokenizer(), 1000)
    before, query = examples(choose, 0), choose.items[0]["query"]
    rows = rows_of_item(model, choose, 0)
    for row, choice, scored in zip(rows, ["one", "only", "two"], ["one", "only", "two"], strict=True):
        check(row, f"{before}{query}\nAnswer: {choice}", scored)
    number = next(n for n, item in enumerate(complete.items) if item["context"] == "a b ")
    check(rows_of_item(model, complete, number)[0], "a b c d", " c d")
    first, second = rows_of_item(model, resolve, 0)
    check(first, "the cat ran off", " ran off")
    check(second, "a dog ran off", " ran off")


def test_examples_are_other_items_with_their_answers(folder):
    choose, *_ = read_folder(folder)
    for number, item in enumerate(choose.items):
        shown = examples(choose, number).split("\n\n")
        assert shown.pop() == "" and len(shown) == 2
        solved = {f"{one['query']}\nAnswer: {one['choices'][one['gold']]}" for one in choose.items if one is not item}
        assert set(shown) <= solved and len(set(shown)) == 2


def test_a_choice_that_begins_another_is_still_scored():
    task = CoreTask("t", "multiple_choice", 0, " ", 0.5, [{"query": "q", "choices": ["a", "ab"], "gold": 0, "line": 1}])
    rows = rows_of_item(stand_in(ByteTokenizer(), 1000), task, 0)
    assert [len(row.continuation) for row in rows] == [1, 1]


def test_core_is_the_mean_of_centred_accuracies(folder, monkeypatch):
    """A model that knows no choice, half of the texts, and each option: accuracies 1/4, 1/2 and 1."""
    tasks = read_folder(folder)
    right = iter([True, False])

    def by_hand(model, rows):
        if len(rows) == 12:  # always the first of three choices, by the mean over its tokens
            return [Likelihood(-float(len(row.continuation)) * (1 + n % 3), False) for n, row in enumerate(rows)]
        if len(rows[0].continuation) == len(" ran off"):
            return [Likelihood(-9.0, False), Likelihood(-8.0, False)]
        return [Likelihood(-1.0, next(right)) for _ in rows]

    monkeypatch.setattr(core_metric, "log_likelihoods", by_hand)
    model = LanguageModel(None, {}, None, ByteTokenizer(), (END,), 1000, 1000)
    results = core_metric.score(model, tasks)
    found = figures_of(tasks, results)
    first = sum(item["gold"] == 0 for item in tasks[0].items) / 4
    accuracies = {"choose": first, "complete": 0.5, "resolve": 1.0}
    assert {task: found[task]["acc"].value for task in accuracies} == accuracies
    expected = np.mean([(first - 0.25) / 0.75, 0.5, (1.0 - 0.5) / 0.5])
    assert found["CORE"]["core"].value == pytest.approx(expected) and found["CORE"]["core"].count == 7
    assert {(result["task"], result["line"]) for result in results} >= {("choose", 4), ("resolve", 1)}


def test_chance_is_zero_and_no_mistakes_is_one():
    assert centered(Figure(0.25, 0.03, 9), 0.25) == Figure(0, pytest.approx(0.04), 9)
    assert centered(Figure(1.0, 0.0, 9), 0.25).value == 1
    assert centered(Figure(0.1, math.nan, 1), 0.25).value < 0


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("core.yaml", None, "core.yaml: No such file or directory; name a folder with core.yaml, eval_meta_data.csv"),
        ("core.yaml", "icl_tasks: [", "core.yaml: is not YAML (while parsing"),
        ("core.yaml", "a: &a [1]\nicl_tasks: [*a, *a]", "core.yaml: has a YAML alias, which is not read"),
        ("core.yaml", YAML.replace("schema", "generation"), "icl_tasks.2.icl_task_type: should be 'multiple_cho"),
        ("core.yaml", YAML.replace("label: complete", "label: choose"), "has 2 tasks with the label choose; give each"),
        ("eval_meta_data.csv", CSV.replace("choose", "chose"), "has no random baseline of choose; add its row"),
        ("eval_meta_data.csv", CSV.replace("25", "a quarter"), "its columns Eval Task and Random baseline cannot be"),
        ("eval_meta_data.csv", CSV.replace("50", "100"), "the random baseline of resolve is not a percentage"),
        ("eval_data/complete.jsonl", '{"context": "a"}', "complete.jsonl, line 1: continuation is missing"),
        (
            "eval_data/resolve.jsonl",
            json.dumps(OPTIONS[0] | {"gold": 2}),
            "line 1: gold=2 is not the index of an op",
        ),
        ("eval_data/world/choose.jsonl", json.dumps(CHOICES[0]), "has 1 item, too few for 2 examples of choose"),
    ],
)
def test_a_folder_that_is_damaged_is_refused_in_one_line(folder, file, content, says):
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises((ConfigError, JsonError)) as error:
        read_folder(folder)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_limit_below_the_examples_is_named_only_if_the_file_has_more(folder):
    with pytest.raises(ConfigError, match=r"^--limit=2 is too small for 2 examples of choose .* type at least 3$"):
        read_folder(folder, limit=2)
    (folder / "eval_data" / "world" / "choose.jsonl").write_text(json.dumps(CHOICES[0]))
    with pytest.raises(ConfigError, match="has 1 item, too few for 2 examples") as error:
        read_folder(folder, limit=2)
    assert "--limit" not in str(error.value)


def test_the_error_of_core_is_that_of_a_mean_of_independent_tasks():
    tasks = [CoreTask(label, "multiple_choice", 0, " ", baseline, []) for label, baseline in (("a", 0.5), ("b", 0.0))]
    accs = {"a": [1, 0, 1, 1], "b": [0, 1, 0, 0]}
    found = figures_of(tasks, [{"task": label, "acc": acc} for label, of_task in accs.items() for acc in of_task])
    error = 0.25  # sqrt(0.1875 / 3), of both accuracies; that of the centred one of `a` is twice as large
    assert found["CORE"]["core"].error == pytest.approx(math.hypot(error / 0.5, error) / 2)
