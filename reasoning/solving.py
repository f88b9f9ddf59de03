# SPDX-License-Identifier: Apache-2.0
"""Solves many problems by search at once: what all searches ask is decoded in one batch of cached rows."""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Generator, Sequence

from configs.errors import check_returned, one_of
from inference.batching import Batch, Continuation, Request
from inference.choice import Sampling
from input_pipeline.tokenization import AnyTokenizer
from reasoning.searches import SEARCHES
from reasoning.tasks import Task
from reasoning.thoughts import Judge, Limits, Propose, Search, Thought

Asking = Generator[list[Request], list[Continuation]]


@dataclasses.dataclass(frozen=True, eq=False)
class Solved:
    """What a search found.

    Attributes:
      problem: its text.
      root: of the tree of thoughts.
      answers: complete ones, the best first.
      num_tokens: that the model drew, for lines and for values.
    """

    problem: str
    root: Thought
    answers: list[Thought]
    num_tokens: int

    @property
    def answer(self) -> str:
        """The lines of the best answer; "" if none was complete."""
        return self.answers[0].answer if self.answers else ""


class Solver:
    """Searches with a model; needs a mesh in context.

    Attributes:
      batch: its cached rows let a search extend earlier answers; an answer whose row was reused is computed again.
    """

    def __init__(self, batch: Batch, tokenizer: AnyTokenizer, task: Task, value, seed: int = 0):
        """Search with `batch` for answers of `task`, with a value of reasoning/values.py.

        Args:
          seed: of the draws, which also depend on the problem.
        """
        self.batch, self.tokenizer, self.task, self.value, self.seed = batch, tokenizer, task, value, seed
        (self.line_end,) = tokenizer.encode("\n")

    def solve(
        self, problems: Sequence[str], search: str, limits: Limits, concurrent: int = 1,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[Solved] | None:  # fmt: skip
        """Search for an answer to each problem, `concurrent` of them at a time.

        `stop` is called after each problem; None is returned once it returns true.

        Raises:
          TypeError: `problems` is a single text, or the search is not a generator that returns thoughts.
          ValueError: there is no such search, `concurrent` is below 1, or a value is NaN.
        """
        if isinstance(problems, str):
            raise TypeError(f"problems={problems!r:.60} is one text; give a list of texts")
        one_of("search", search, SEARCHES)
        if concurrent < 1:
            raise ValueError(f"concurrent={concurrent} must be 1 or more")
        waiting = [(place, _Asker(self, problem, search, limits)) for place, problem in enumerate(problems)][::-1]
        running: dict[int, tuple[_Asker, list[Continuation]]] = {}
        try:
            return self._solved(waiting, running, concurrent, stop)
        finally:  # what is left of a stop or of a mistake in a value
            for one in itertools.chain.from_iterable(asked for _, asked in running.values()):
                self.batch.cancel(one)

    def _solved(
        self, waiting: list[tuple[int, "_Asker"]], running: dict[int, tuple["_Asker", list[Continuation]]],
        concurrent: int, stop: Callable[[], bool],
    ) -> list[Solved] | None:  # fmt: skip
        """Return what is found for the problems in `waiting`, last ones first; those in `running` have begun."""
        found: list[Solved | None] = [None] * len(waiting)
        while waiting or running:
            while waiting and len(running) < concurrent:
                place, asker = waiting.pop()
                running[place] = asker, []
            for place, (asker, asked) in list(running.items()):
                if not all(one.reason for one in asked):
                    continue
                if (requests := asker.next(asked)) is not None:
                    running[place] = asker, [self.batch.add(request) for request in requests]
                    continue
                found[place] = asker.solved
                del running[place]
                if (waiting or running) and stop():
                    return None
            if running:
                self.batch.step()
        return found


class _Asker:
    """One search: turns what it asks into requests, and their continuations into thoughts and values."""

    def __init__(self, solver: Solver, problem: str, search: str, limits: Limits):
        self.solver, self.task, self.problem, self.limits = solver, solver.task, problem, limits
        self.root, self.num_draws, self.num_tokens = Thought(), 0, 0
        self.solved: Solved | None = None
        begun = SEARCHES[search](self.root, limits)
        check_returned(f"search {search}", begun, isinstance(begun, Generator), "a generator that yields what it asks")
        self._asking = self._run(begun, search)

    def next(self, answers: list[Continuation]) -> list[Request] | None:
        """Return the next requests, given the continuations of the last ones (none at first); None at the end."""
        self.num_tokens += sum(len(one.tokens) + (one.reason == "end") for one in answers)
        try:
            return self._asking.send(answers or None)
        except StopIteration:
            return None

    def _run(self, search: Search, name: str) -> Asking:
        result = None
        while True:
            try:
                work = search.send(result)
            except StopIteration as end:
                check_returned(f"search {name}", end.value, isinstance(end.value, list | tuple), "a list of thoughts")
                self.solved = Solved(self.problem, self.root, list(end.value), self.num_tokens)
                return
            result = yield from self._judge(work) if isinstance(work, Judge) else self._propose(work)

    def _propose(self, work: Propose) -> Generator[list[Request], list[Continuation], list[list[Thought]]]:
        """Draw lines, and return the new thoughts after each parent."""
        parents = [parent for parent in work.parents for _ in range(work.count)]
        drawn = yield from self._draw(parents, work.temperature)
        while work.to_the_end and (unfinished := [n for n, one in enumerate(drawn) if self._goes_on(one)]):
            more = yield from self._draw([_in_the_tree(drawn[n]) for n in unfinished], work.temperature)
            for place, thought in zip(unfinished, more, strict=True):
                drawn[place] = thought
        groups = []
        for index in range(len(work.parents)):
            mine = [one for one in drawn[index * work.count :][: work.count] if one]
            groups.append(_merged(mine, work.to_the_end))
            for thought in groups[-1]:
                thought.parent.children.append(thought)
        return groups

    def _goes_on(self, thought: Thought | None) -> bool:
        return thought is not None and not thought.is_final and thought.depth < self.limits.max_depth

    def _draw(
        self, parents: Sequence[Thought], temperature: float
    ) -> Generator[list[Request], list[Continuation], list[Thought | None]]:
        """Draw a line after each parent; None for one that is too long."""
        requests = [self._line_request(parent, temperature) for parent in parents]
        continuations = (yield requests) if requests else []
        return [self._thought(parent, one) for parent, one in zip(parents, continuations, strict=True)]

    def _line_request(self, parent: Thought, temperature: float) -> Request:
        self.num_draws += 1
        name = f"{self.solver.seed} {self.problem} {self.num_draws}"
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest())
        prompt, ends = self._prompt(parent), [self.solver.line_end]
        longest = min(self.task.max_line, self.solver.batch.length - len(prompt))
        return Request(prompt, longest, Sampling(temperature=temperature, seed=seed), ends)

    def _has_room(self, thought: Thought) -> bool:
        """Return whether a row has room for a token after a thought, and after the question whether it is right."""
        question = self.solver.tokenizer.encode(self.task.verdict_question(self.problem, thought.lines))
        return max(len(self._prompt(thought)), len(question)) < self.solver.batch.length

    def _prompt(self, thought: Thought) -> list[int]:
        """Return the tokens after which the model writes the line that follows a thought."""
        return self.solver.tokenizer.encode(self.task.prompt(self.problem, thought.lines))

    def _thought(self, parent: Thought, one: Continuation) -> Thought | None:
        if one.reason != "end":
            return None
        text = self.solver.tokenizer.decode(one.tokens)
        thought = Thought(
            text, parent, sum(one.log_probs), state=self.task.state(text), is_final=self.task.is_final(text)
        )  # fmt: skip
        return thought if self._has_room(thought) else None

    def _judge(self, work: Judge) -> Asking:
        """Write the values of thoughts; ValueError for NaN, with which no order of the answers is right."""
        if not work.thoughts:
            return
        value = self.solver.value
        requests = [value.requests(self.problem, thought) for thought in work.thoughts]
        flat = list(itertools.chain.from_iterable(requests))
        found = iter((yield flat) if flat else ())
        answers = [list(itertools.islice(found, len(asked))) for asked in requests]
        for thought, number in zip(work.thoughts, value.values(self.problem, work.thoughts, answers), strict=True):
            if math.isnan(number):
                raise ValueError(f"the value of the answer {thought.answer!r:.200} is NaN; a value must be a number")
            thought.value = number


def _in_the_tree(thought: Thought) -> Thought:
    """Return the child of its parent with the same line, which was drawn once more, or add it as a new one."""
    for same in thought.parent.children:
        if same.text == thought.text:
            same.num_draws += 1
            return same
    thought.parent.children.append(thought)
    return thought


def _merged(thoughts: Sequence[Thought], whole_answers: bool) -> list[Thought]:
    """Return the likeliest thought of each state, or of each answer, with the number of its draws."""
    kept: dict[str, Thought] = {}
    for thought in sorted(thoughts, key=lambda thought: -thought.total_log_prob):
        name = thought.answer if whole_answers else thought.state
        if name in kept:
            kept[name].num_draws += 1
        else:
            kept[name] = thought
    return list(kept.values())
