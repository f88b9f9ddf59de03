# SPDX-License-Identifier: Apache-2.0
"""Thoughts, the nodes of a tree of partial answers, and what a search asks of the model about them."""

import dataclasses
import math
from collections.abc import Generator, Sequence


@dataclasses.dataclass(eq=False)
class Thought:
    """A line of an answer, after the lines of its parents.

    Attributes:
      text: of the line, without its newline; "" for the root, the problem itself.
      parent: None for the root.
      log_prob: of the line after its parents, by the model.
      value: how promising the answer so far is, in [0, 1] for most values; NaN until it is asked for.
      state: what is left to do, as the task reads it from the line. Siblings in the same state are one thought;
        where whole answers are drawn, those with the same line are.
      num_draws: how often the model drew it.
      visits: how often Monte-Carlo tree search went through it.
      is_final: whether the answer is complete.
    """

    text: str = ""
    parent: "Thought | None" = None
    log_prob: float = 0.0
    value: float = math.nan
    state: str = ""
    num_draws: int = 1
    visits: int = 0
    is_final: bool = False
    children: list["Thought"] = dataclasses.field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """The lines of the answer up to this one."""
        return [*self.parent.lines, self.text] if self.parent else []

    @property
    def depth(self) -> int:
        """The number of lines."""
        return self.parent.depth + 1 if self.parent else 0

    @property
    def total_log_prob(self) -> float:
        """The log-probability of all lines."""
        return self.log_prob + (self.parent.total_log_prob if self.parent else 0.0)

    @property
    def answer(self) -> str:
        """The lines, each with its newline."""
        return "".join(f"{line}\n" for line in self.lines)

    def all(self) -> list["Thought"]:
        """Return this thought and everything below it, parents first."""
        return [self, *(thought for child in self.children for thought in child.all())]


@dataclasses.dataclass(frozen=True)
class Propose:
    """Asks for lines after each of these thoughts; the answer is a list of new thoughts for each.

    Lines after one parent that lead to the same state are one thought, the likeliest.

    Attributes:
      count: lines to draw for each.
      temperature: of the draws; 0 takes the likeliest line, once.
      to_the_end: whether each draw goes on to the end of the answer; the thoughts are then the last lines of different
        answers.
    """

    parents: Sequence[Thought]
    count: int
    temperature: float = 1.0
    to_the_end: bool = False


@dataclasses.dataclass(frozen=True)
class Judge:
    """Asks for the `value` of thoughts; there is no answer, since it is written to them."""

    thoughts: Sequence[Thought]


@dataclasses.dataclass(frozen=True)
class Limits:
    """The budget of a search.

    Attributes:
      max_thoughts: partial answers that are kept at once: the breadth of a level, or the rows of the cache.
      thoughts_per_step: lines that are drawn after a partial answer.
      max_depth: lines of an answer at most.
      temperature: of the draws.
    """

    max_thoughts: int = 5
    thoughts_per_step: int = 3
    max_depth: int = 3
    temperature: float = 1.0

    @property
    def max_drawn(self) -> int:
        """Lines that a search draws at most; all searches with these limits have the same budget."""
        return self.max_thoughts * self.thoughts_per_step * self.max_depth

    def num_drawn_after(self, thought: Thought) -> int:
        """Return the lines to draw after a thought; the first level has one parent, and the budget of a whole level."""
        return self.thoughts_per_step * (1 if thought.parent else self.max_thoughts)


Search = Generator[Propose | Judge, list[list[Thought]] | None, list[Thought]]
