# SPDX-License-Identifier: Apache-2.0
"""How promising a partial answer is: by the model's verdict, its likelihood, a user's function, or what is right.

A value is a class of VALUES. It asks the model for continuations, and turns them into a number. A search compares these
numbers; depth-first and best-first search also expect them in [0, 1].
"""

import math
from collections.abc import Callable, Sequence

from inference.batching import Continuation, Request
from inference.choice import Sampling
from input_pipeline.tokenization import AnyTokenizer
from reasoning.tasks import Task
from reasoning.thoughts import Thought

YES, NO = "y", "n"  # the verdicts


class Verdict:
    """The probability that the model answers yes rather than no to the task's question about the lines."""

    def __init__(self, task: Task, tokenizer: AnyTokenizer):
        self.task, self.tokenizer = task, tokenizer
        self.yes, self.no = (tokenizer.encode(word)[0] for word in (YES, NO))

    def requests(self, problem: str, thought: Thought) -> list[Request]:
        """Return the question."""
        asked = self.tokenizer.encode(self.task.verdict_question(problem, thought.answer))
        return [Request(asked, 1, Sampling(temperature=0.0), wants_top=True)]

    def value(self, problem: str, thought: Thought, answers: Sequence[Continuation]) -> float:
        """Return yes / (yes + no); 0 where neither is among the likeliest tokens."""
        (top,) = answers[0].tops
        yes, no = (math.exp(top.get(token, -math.inf)) for token in (self.yes, self.no))
        return yes / (yes + no) if yes + no else 0.0


class WithoutModel:
    """The base of values that need no further tokens."""

    def requests(self, problem: str, thought: Thought) -> list[Request]:
        """Return nothing to ask."""
        return []


class Likelihood(WithoutModel):
    """The probability of the lines, by the model that drew them."""

    def __init__(self, task: Task, tokenizer: AnyTokenizer):
        pass

    def value(self, problem: str, thought: Thought, answers: Sequence[Continuation]) -> float:
        """Return a number in [0, 1]."""
        return math.exp(thought.total_log_prob)


class Oracle(WithoutModel):
    """1 if a right answer begins with the lines, else 0: an upper bound, not a search."""

    def __init__(self, task: Task, tokenizer: AnyTokenizer):
        self.task = task

    def value(self, problem: str, thought: Thought, answers: Sequence[Continuation]) -> float:
        """Return 0 or 1."""
        return float(self.task.can_succeed(problem, thought.lines))


class Function(WithoutModel):
    """A function (problem, answer so far) -> number of the user's."""

    def __init__(self, function: Callable[[str, str], float]):
        self.function = function

    def value(self, problem: str, thought: Thought, answers: Sequence[Continuation]) -> float:
        """Return what the function returns."""
        return float(self.function(problem, thought.answer))


VALUES = {"verdict": Verdict, "likelihood": Likelihood, "oracle": Oracle}
