# SPDX-License-Identifier: Apache-2.0
"""Scores the user's tasks (scoring/questions.py).

- multiple choice: `acc`, the share of questions whose right choice has the highest log-likelihood; `acc_norm`, the same
  with log-likelihoods divided by the choices' bytes;
- exact match: `exact_match`, the share of prompts whose greedy continuation is the expected text;
- perplexity: `bits_per_byte`, `token_perplexity`, `byte_perplexity`, `word_perplexity`, over all texts of a task.
"""

import math
from collections.abc import Sequence

from configs.errors import ConfigError
from input_pipeline.tokenization import AnyTokenizer
from scoring import figures
from scoring.figures import Figure
from scoring.likelihood import LanguageModel, log_likelihoods
from scoring.questions import STOP, Item
from scoring.texts import continue_greedily, row_of_pair, rows_of_text, split

MAX_TOKENS = 64  # of an answer, unless the item says otherwise


def score(model: LanguageModel, items: Sequence[Item]) -> list[dict]:
    """Return the result of each item, for the file of results; the same in all processes."""
    found = [{"task": item.task, "line": item.line} for item in items]
    asked = [number for number, item in enumerate(items) if item.kind == "exact"]
    rows = [rows_of_item(model, item) for item in items]
    likelihoods = iter(log_likelihoods(model, [row for of_item in rows for row in of_item]))
    for item, of_item, result in zip(items, rows, found, strict=True):
        values = [next(likelihoods).value for _ in of_item]
        if item.kind == "choices":
            result.update(_of_choices(item.content, values))
        elif item.kind == "text":
            result.update(_of_text(item.content["text"], sum(values), sum(len(row.continuation) for row in of_item)))
    contents = [items[number].content for number in asked]
    answers = continue_greedily(
        model, [content["prompt"] for content in contents],
        max_tokens=[content.get("max_tokens", MAX_TOKENS) for content in contents],
        stops=[content.get("stop", STOP) for content in contents],
    )  # fmt: skip
    for number, content, answer in zip(asked, contents, answers, strict=True):
        is_exact = answer.strip() == content["exact"].strip()
        found[number].update(generated=answer, exact=content["exact"], exact_match=int(is_exact))
    return found


def rows_of_item(model: LanguageModel, item: Item) -> list:
    """Return the rows to score of an item: one for each choice, the windows of a text, none of a prompt."""
    match item.kind:
        case "choices":
            question = item.content["question"]
            return [row_of_pair(model, question, separated(question, one)) for one in item.content["choices"]]
        case "text":
            return rows_of_text(model, item.content["text"])
    return []


def check_lengths(items: Sequence[Item], tokenizer: AnyTokenizer, max_length: int, key: str) -> None:
    """Raise ConfigError if a choice has more than `max_length` tokens; `key` names the files in the message."""
    for item in items:
        for choice in item.content["choices"] if item.kind == "choices" else ():
            question = item.content["question"]
            if (length := len(split(tokenizer, question, separated(question, choice))[1])) > max_length:
                raise ConfigError(
                    f"{key}: line {item.line} of {item.task} has a choice of {length} tokens, more than "
                    f"model.max_length={max_length}; shorten it"
                )


def separated(question: str, choice: str) -> str:
    """Return the choice with a space before it, unless question or choice have white space there."""
    return choice if not question or question[-1].isspace() or choice[0].isspace() else f" {choice}"


def _of_choices(content: dict, values: list[float]) -> dict:
    normalized = [value / len(one.encode()) for value, one in zip(values, content["choices"], strict=True)]
    chosen, chosen_norm = values.index(max(values)), normalized.index(max(normalized))
    answer = content["answer"]
    return {
        "log_likelihoods": values, "chosen": chosen, "chosen_norm": chosen_norm, "answer": answer,
        "acc": int(chosen == answer), "acc_norm": int(chosen_norm == answer),
    }  # fmt: skip


def _of_text(text: str, value: float, num_tokens: int) -> dict:
    return {
        "log_likelihood": value, "tokens": num_tokens, "bytes": len(text.encode()), "words": len(text.split()),
    }  # fmt: skip


def figures_of(results: Sequence[dict]) -> dict[str, dict[str, Figure]]:
    """Return {task: {metric: figure}} of the results of `score`."""
    tasks = {}
    for result in results:
        tasks.setdefault(result["task"], []).append(result)
    return {task: _metrics(of_task) for task, of_task in tasks.items()}


def _metrics(results: list[dict]) -> dict[str, Figure]:
    found = {}
    for name in ("acc", "acc_norm", "exact_match"):
        if values := [result[name] for result in results if name in result]:
            found[name] = figures.mean(values)
    if texts := [result for result in results if "log_likelihood" in result]:
        losses = [-text["log_likelihood"] for text in texts]
        in_bits = [loss / math.log(2) for loss in losses]
        found["bits_per_byte"] = figures.ratio(in_bits, [text["bytes"] for text in texts])
        for unit in ("token", "byte", "word"):
            weights = [text[f"{unit}s"] for text in texts]
            if sum(weights):
                found[f"{unit}_perplexity"] = figures.exponential(figures.ratio(losses, weights))
    return found
