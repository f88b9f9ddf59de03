# SPDX-License-Identifier: Apache-2.0
"""Answers that a model draws in reinforcement learning: where they end, and how they are rewarded."""

import inspect
import pathlib
import sys
import types
from collections.abc import Callable, Sequence

from configs.errors import ConfigError
from inference.prompts import answer_ends
from input_pipeline.chat.encoding import format_of_tokenizer
from input_pipeline.tasks import questions
from input_pipeline.tasks.countdown import VERDICT
from input_pipeline.tokenization import AnyTokenizer
from reasoning.tasks import TASKS, Task

Reward = Callable[[str, str], float]
REWARD_NAMES = ("task", "reference", "random")  # those that are not functions of a recipe
REWARDS: dict[str, Reward] = {}  # by name, as `grpo.reward` has it


def reward(function: Reward) -> Reward:
    """Register a function (prompt, answer) -> number as the reward `grpo.reward=NAME`, with the function's name.

    Raises ConfigError for what is not a function, and for a name that is taken.
    """
    if not isinstance(inspect.unwrap(function), types.FunctionType | types.MethodType):
        raise ConfigError(f"@reward takes a function (prompt, answer) -> number, not {function!r:.80}; use def")
    if function.__name__ in REWARD_NAMES:
        raise ConfigError(f"@reward: {function.__name__} is the name of a reward of Torus; rename the function")
    before = REWARDS.get(function.__name__, function)
    files = sorted({_file(before), _file(function)})
    if len(files) > 1 and before.__module__ not in sys.modules:  # a function of a module is for recipes that import it
        raise ConfigError(f"@reward: {function.__name__} is a function of {' and of '.join(files)}; rename one of them")
    REWARDS[function.__name__] = function
    return function


def _file(function: Reward) -> str:
    return str(pathlib.Path(inspect.unwrap(function).__code__.co_filename).resolve())


class Lines:
    """Answers of lines; the task says which line is the last one."""

    def __init__(self, tokenizer: AnyTokenizer, task: Task):
        self.tokenizer, self.task = tokenizer, task
        (self._line_end,) = tokenizer.encode("\n")

    def is_complete(self, tokens: Sequence[int]) -> bool:
        """Return whether an answer ends with its last token."""
        if tokens[-1] != self._line_end:
            return False
        lines = self.text(tokens).removesuffix("\n").split("\n")
        return self.task.is_final(lines[-1]) or len(lines) >= self.task.max_depth

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer."""
        return self.tokenizer.decode(tokens)

    def last_line(self, answer: str) -> str:
        """Return the last line of an answer, without the verdicts that follow each line."""
        return last_line(VERDICT.sub("", answer))

    def score(self, number: int, prompt: str, answer: str) -> float:
        """Return 1 if an answer is right, else 0."""
        return float(self.task.is_correct(prompt, answer))


class Turns:
    """Answers in a conversation, which end where the assistant's turn does."""

    def __init__(self, tokenizer: AnyTokenizer, name: str):
        """Read the format of the conversations; `name` is a value of data.tokenizer."""
        self.tokenizer = tokenizer
        self._ends = answer_ends(tokenizer, format_of_tokenizer(tokenizer, name))

    def is_complete(self, tokens: Sequence[int]) -> bool:
        """Return whether an answer ends with its last token."""
        return tokens[-1] in self._ends

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer up to the token that ends it; in data a template may write more after that."""
        end = next((place for place, token in enumerate(tokens) if token in self._ends), len(tokens))
        return self.tokenizer.decode(tokens[:end])

    def last_line(self, answer: str) -> str:
        """Return the last line of an answer."""
        return last_line(answer)


class Answers(Turns):
    """Answers to the questions of a generator, see input_pipeline/tasks/questions.py."""

    def __init__(self, tokenizer: AnyTokenizer, name: str, generator: str):
        super().__init__(tokenizer, name)
        self._generator = questions.generator(generator)

    def score(self, number: int, prompt: str, answer: str) -> float:
        """Return the generator's score of an answer to its question of this number, from 0 to 1."""
        return self._generator.score(number, answer)


def answers_of(source: str, path: str, tokenizer: AnyTokenizer, name: str) -> Lines | Turns:
    """Return the answers to the prompts of data.source and data.path; `name` is the value of data.tokenizer."""
    if source in TASKS:
        return Lines(tokenizer, TASKS[source]())
    return Answers(tokenizer, name, path) if source in questions.SOURCES else Turns(tokenizer, name)


def last_line(answer: str) -> str:
    """Return the last line of a text, without spaces around it."""
    return answer.strip().rpartition("\n")[2].strip()


def registered(name: str) -> Reward:
    """Return the function of `grpo.reward`; ConfigError if no recipe registered it."""
    if name not in REWARDS:
        raise ConfigError(
            f"grpo.reward={name} is not task, reference, random, or a function that the recipe registers "
            f"({', '.join(REWARDS) or 'it registers none'}); name that recipe by --config, see docs/reasoning.md"
        )
    return REWARDS[name]
