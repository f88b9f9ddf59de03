# SPDX-License-Identifier: Apache-2.0
"""The interface of a task, and the task of arithmetic countdown.

A task reads what the model wrote. Only `is_correct` and `can_succeed` know what is right; no search calls them.
"""

from collections.abc import Sequence

from input_pipeline.tasks import countdown
from input_pipeline.windows import Windows


class Task:
    """Problems whose answers are lines of text.

    Attributes:
      max_depth: lines of an answer at most.
      max_line: tokens of a line at most, with its newline.
    """

    max_depth = 8
    max_line = 64

    def check(self, problem: str) -> None:
        """Raise ValueError if a text is not a problem of the task."""

    def prompt(self, problem: str, lines: Sequence[str] = ()) -> str:
        """Return the text after which the model writes the next line of an answer with these lines."""
        return problem + "".join(f"{line}\n" for line in lines)

    def problems(self, heldout: Windows, count: int) -> list[str]:
        """Return held-out problems."""
        raise NotImplementedError

    def state(self, line: str) -> str:
        """Return what is left to do after a line; two lines with the same state are equally good."""
        return line

    def is_final(self, line: str) -> bool:
        """Return whether a line completes an answer."""
        raise NotImplementedError

    def verdict_question(self, problem: str, lines: Sequence[str]) -> str:
        """Return a text after which the model writes `y` or `n`: whether a right answer begins with these lines."""
        return f"{self.prompt(problem, lines)}?"

    def is_correct(self, problem: str, answer: str) -> bool:
        """Return whether an answer is right."""
        raise NotImplementedError

    def can_succeed(self, problem: str, lines: list[str]) -> bool:
        """Return whether a right answer begins with these lines."""
        raise NotImplementedError


class Countdown(Task):
    """Arithmetic countdown, see input_pipeline/tasks/countdown.py; a line ends with the numbers that are left.

    The next line is written as if the verdict on those before it were `y`.
    """

    max_depth = 3
    max_line = 24

    def check(self, problem):
        numbers, target = countdown.parse(problem)
        if not 3 <= len(numbers) <= 4 or not all(1 <= number <= countdown.LARGEST for number in (*numbers, target)):
            raise ValueError(f"{problem!r} needs 3 or 4 numbers; they and the target are from 1 to {countdown.LARGEST}")

    def prompt(self, problem, lines=()):
        return problem + "".join(f"{line}\n?y" for line in lines)

    def problems(self, heldout, count):
        return heldout.problems(count, num_numbers=4)

    def verdict_question(self, problem, lines):
        return self.prompt(problem, lines).removesuffix("y")

    def state(self, line):
        return line.partition(";")[2]

    def is_final(self, line):
        return self.state(line).isdigit()

    def is_correct(self, problem, answer):
        return countdown.is_correct(problem, answer)

    def can_succeed(self, problem, lines):
        return countdown.can_succeed(problem, lines)


TASKS: dict[str, type[Task]] = {"countdown": Countdown, "countdown_rollouts": Countdown}  # by data.source
