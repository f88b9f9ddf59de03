# SPDX-License-Identifier: Apache-2.0
"""How promising a partial answer is: by a verdict of the model, a trained head, its likelihood, a function of the user.

A value is a class of VALUES, made with a task, a tokenizer and the engine of the model. A search compares the numbers
that it returns; depth-first and best-first search also expect them in [0, 1].
"""

import math
from collections.abc import Callable, Sequence
from typing import SupportsFloat

import numpy as np

from configs.errors import check_returned
from inference.batching import Continuation, Request
from inference.choice import Sampling
from inference.engine import Engine, pad_rows
from input_pipeline.tokenization import AnyTokenizer
from reasoning.tasks import Task
from reasoning.thoughts import Thought

YES, NO = "y", "n"  # the verdicts


class Value:
    """The interface of a value. It may ask the model for continuations."""

    def requests(self, problem: str, thought: Thought) -> list[Request]:
        """Return what to ask about a thought."""
        return []

    def values(
        self, problem: str, thoughts: Sequence[Thought], answers: Sequence[Sequence[Continuation]]
    ) -> list[float]:
        """Return the value of each thought, given the continuations of its requests."""
        return [self.value(problem, *one) for one in zip(thoughts, answers, strict=True)]

    def value(self, problem: str, thought: Thought, answers: Sequence[Continuation]) -> float:
        """Return the value of a thought, given the continuations of its requests."""
        raise NotImplementedError


class Verdict(Value):
    """The probability that the model answers yes rather than no to the task's question about the lines."""

    def __init__(self, task: Task, tokenizer: AnyTokenizer, engine: Engine):
        self.task, self.tokenizer = task, tokenizer
        self.yes, self.no = (tokenizer.encode(word)[0] for word in (YES, NO))

    def requests(self, problem, thought):
        """Return the question."""
        asked = self.tokenizer.encode(self.task.verdict_question(problem, thought.lines))
        return [Request(asked, 1, Sampling(temperature=0.0), wants_top=True)]

    def value(self, problem, thought, answers):
        """Return yes / (yes + no); 0 where neither is among the likeliest tokens."""
        (top,) = answers[0].tops
        yes, no = (math.exp(top.get(token, -math.inf)) for token in (self.yes, self.no))
        return yes / (yes + no) if yes + no else 0.0


class Head(Value):
    """The expected reward of an answer that begins with these lines, by the head of objectives/value_head.py.

    All thoughts of a level are read in one pass, without the cache.
    """

    def __init__(self, task: Task, tokenizer: AnyTokenizer, engine: Engine):
        self.task, self.tokenizer, self.engine = task, tokenizer, engine
        self.head_D = np.asarray(engine.params["value_head"]["kernel"], np.float32)[:, 0]

    def values(self, problem, thoughts, answers):
        """Return the values where the model would write its verdict: that state knows most about the lines."""
        texts = [self.tokenizer.encode(self.task.verdict_question(problem, thought.lines)) for thought in thoughts]
        rows, length = (-(-size // 32) * 32 for size in (len(texts), max(map(len, texts))))  # each shape is compiled
        tokens_BT = pad_rows([*texts, *[[]] * (rows - len(texts))], min(length, self.engine.length))
        states_BD = np.asarray(self.engine.states(tokens_BT), np.float32)[: len(texts)]
        return (1 / (1 + np.exp(-states_BD @ self.head_D))).tolist()


class Likelihood(Value):
    """The probability of the lines, by the model that drew them."""

    def __init__(self, task: Task, tokenizer: AnyTokenizer, engine: Engine):
        pass

    def value(self, problem, thought, answers):
        """Return a number in [0, 1]."""
        return math.exp(thought.total_log_prob)


class Oracle(Value):
    """1 if a right answer begins with the lines, else 0: an upper bound, not a search."""

    def __init__(self, task: Task, tokenizer: AnyTokenizer, engine: Engine):
        self.task = task

    def value(self, problem, thought, answers):
        """Return 0 or 1."""
        return float(self.task.can_succeed(problem, thought.lines))


class Function(Value):
    """A function (problem, answer so far) -> number of the user's."""

    def __init__(self, function: Callable[[str, str], float]):
        self.function = function

    def value(self, problem, thought, answers):
        """Return what the function returns; TypeError if it is not a number."""
        found = self.function(problem, thought.answer)
        check_returned("the value function", found, isinstance(found, SupportsFloat), "a number")
        return float(found)


VALUES = {"verdict": Verdict, "value_head": Head, "likelihood": Likelihood, "oracle": Oracle}
