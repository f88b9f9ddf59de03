# SPDX-License-Identifier: Apache-2.0
"""Arithmetic countdown: reach a target from three or four numbers by +, -, * and /. Problems, answers, and windows.

A problem is the text `3 4 8 12=27:`. Each line of its answer combines two numbers, and repeats those that are left in
ascending order. After each line, `?` asks for a verdict: `y` if a right answer begins with the lines so far, else `n`.
The next line follows the verdict:

    12+8=20;3 4 20
    ?y20+4=24;3 24
    ?y24+3=27;27
    ?y

Numbers and results are whole, from 1 to LARGEST. The larger number of a pair comes first. A token is a number, or
another character.
"""

import functools
import itertools
import random
import re
from collections.abc import Iterator

import numpy as np

from input_pipeline.cache import digest_of_json
from input_pipeline.errors import DataError
from input_pipeline.order import mix
from input_pipeline.tasks.generated import GeneratedRows
from input_pipeline.tasks.hashes import is_held_out
from input_pipeline.tokenization import NumberTokenizer

LARGEST, LARGEST_GIVEN = 30, 15  # of results and targets; of the numbers of a problem
FOUR_SHARE = 0.8  # of the problems; the others have three numbers
RIGHT_SHARE = 0.1  # of the answers; the others are attempts
MISTAKEN_SHARE = 0.4  # of the attempts
HELDOUT_SHARE = 1 / 16  # of the problems

MOST_DRAWS = 1000  # of problems in vain
USUAL_LENGTH = 128  # of a row
State = tuple[int, ...]  # the numbers that are left, ascending
Moves = list[tuple[str, State]]  # each a line and the numbers that it leaves
VERDICT = re.compile(r"^\?[yn]", re.MULTILINE)
PROBLEM = re.compile(r"(\d+(?: \d+)+)=(\d+):")


def question(numbers: State, target: int) -> str:
    """Return the text of a problem."""
    return f"{_listed(numbers)}={target}:"


def parse(text: str) -> tuple[State, int]:
    """Return the numbers and the target of a problem's text; ValueError if the text is not a problem."""
    if not (found := PROBLEM.fullmatch(text)):
        raise ValueError(f"{text!r} is not a countdown problem; write one as '3 4 8 12=27:'")
    return tuple(sorted(map(int, found[1].split()))), int(found[2])


@functools.lru_cache(1 << 16)
def moves(numbers: State) -> tuple[tuple[str, State], ...]:
    """Return each line that may follow, without its newline, and the numbers that it leaves."""
    found = {}
    for first, second in itertools.combinations(range(len(numbers)), 2):
        rest = [number for place, number in enumerate(numbers) if place not in (first, second)]
        for text, result in _results(numbers[second], numbers[first]):
            left = tuple(sorted([*rest, result]))
            found[f"{text}={result};{_listed(left)}"] = left
    return tuple(found.items())


@functools.lru_cache(1 << 16)
def reachable(numbers: State) -> frozenset[int]:
    """Return all targets that some moves reach."""
    if len(numbers) == 1:
        return frozenset(numbers)
    return frozenset().union(*(reachable(left) for _, left in moves(numbers)))


def state_after(numbers: State, lines: list[str]) -> State | None:
    """Return the numbers that are left after lines of an answer; None if a line is not a move."""
    for line in lines:
        if (left := dict(moves(numbers)).get(line)) is None:
            return None
        numbers = left
    return numbers


def is_correct(problem: str, answer: str) -> bool:
    """Return whether every line of an answer is a move, and the target alone is left; verdicts do not count."""
    numbers, target = parse(problem)
    return state_after(numbers, VERDICT.sub("", answer).removesuffix("\n").split("\n")) == (target,)


def can_succeed(problem: str, lines: list[str]) -> bool:
    """Return whether a right answer begins with these lines."""
    numbers, target = parse(problem)
    left = state_after(numbers, lines)
    return left is not None and target in reachable(left)


def is_heldout(numbers: State, target: int) -> bool:
    """Return whether a problem is held out, by a hash of its text."""
    return is_held_out(question(numbers, target).encode(), HELDOUT_SHARE)


class CountdownWindows(GeneratedRows):
    """Rows of problems with answers or verdicts.

    An answer is a random way to the target, or an attempt: some lines of it, then random moves, or a line with a
    mistake, after which it ends. Without attempts, the model would learn that each last line ends with the target, and
    would claim it of any two numbers. Only answers are learned, without lines that have a mistake: other targets are
    IGNORED. No problem of the training rows is held out, nor is the problem of three numbers that is left after the
    first line of its right answer.
    """

    vocab_size = NumberTokenizer.vocab_size
    tokenizer = NumberTokenizer()

    def __init__(self, seed: int, stream: str):
        super().__init__(seed, stream)
        self.digest = digest_of_json(["countdown", seed])

    def problems(self, count: int, num_numbers: int) -> list[str]:
        """Return different problems of the stream with this many numbers."""
        keys = (int(key) for key in mix(np.arange(1 << 20, dtype=np.uint64)) ^ self._key)
        found = (self._problem(random.Random(key), num_numbers) for key in keys)
        texts = dict.fromkeys(question(*problem[:2]) for problem in itertools.islice(found, 2 * count))
        return list(texts)[:count]

    def _sequences(self, key: int, length: int) -> Iterator[tuple[list[int], list[bool]]]:
        """Yield (tokens, which are learned) of each text of a row."""
        draw, left = random.Random(key), length
        while True:
            tokens, is_learned = self._fitting(draw, length)
            left -= len(tokens) - 1
            if left < 0:
                return
            yield tokens, is_learned

    def _fitting(self, draw: random.Random, length: int) -> tuple[list[int], list[bool]]:
        """Return (tokens, which are learned) of the next text that fits in an empty row."""
        for _ in range(MOST_DRAWS):
            numbers, target, path = self._problem(draw, 4 if draw.random() < FOUR_SHARE else 3)
            parts = [(question(numbers, target), False), *self._answer(draw, numbers, target, path)]
            tokens, is_learned = self._encoded(parts)
            if len(tokens) - 1 <= length:
                return tokens, is_learned
        raise DataError(f"train.sequence_length={length} is too short for a countdown problem; use {USUAL_LENGTH}")

    def _answer(self, draw: random.Random, numbers: State, target: int, path: Moves) -> list[tuple[str, bool]]:
        """Return the parts of an answer: lines, which are learned unless they have a mistake, and verdicts."""
        if draw.random() < RIGHT_SHARE:
            return [(f"{line}\n?y", True) for line, _ in path]
        kept = path[: _below(draw, len(path))]
        state = kept[-1][1] if kept else numbers
        moves_made = [*kept, *_walk(draw, state, len(path) - len(kept))]
        if draw.random() >= MISTAKEN_SHARE:
            return [(f"{line}\n?{'y' if target in reachable(left) else 'n'}", True) for line, left in moves_made]
        wrong = _claim(draw, state, target) if len(state) == 2 else _mistaken(draw, moves_made[len(kept)][0])
        verdict = "y" if can_succeed(question(state, target), [wrong]) else "n"
        return [*((f"{line}\n?y", True) for line, _ in kept), (f"{wrong}\n?", False), (verdict, True)]

    def _encoded(self, parts: list[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
        encoded = [(self.tokenizer.encode(text), learned) for text, learned in parts]
        return [token for tokens, _ in encoded for token in tokens], [flag for tokens, flag in encoded for _ in tokens]

    def _problem(self, draw: random.Random, num_numbers: int) -> tuple[State, int, Moves]:
        """Return (numbers, target, moves to it) of a problem of this stream."""
        while True:
            numbers = tuple(sorted(1 + _below(draw, LARGEST_GIVEN) for _ in range(num_numbers)))
            path = _walk(draw, numbers, num_numbers - 1)
            target = path[-1][1][0]
            through = [path[0][1]] if self.stream == "train" else []
            if all(self._has(state, target) for state in [numbers, *through]):
                return numbers, target, path

    def _has(self, numbers: State, target: int) -> bool:
        """Return whether a problem belongs to this stream; two numbers belong to both."""
        return len(numbers) < 3 or is_heldout(numbers, target) == (self.stream == "heldout")


def _claim(draw: random.Random, state: State, target: int) -> str:
    """Return a last line that claims the target; half the time its operation is the one that comes nearest."""
    smaller, larger = state
    operations = sorted(_results(larger, smaller), key=lambda result: abs(result[1] - target))
    text, _ = operations[0 if draw.random() < 0.5 else _below(draw, len(operations))]
    return f"{text}={target};{target}"


def _mistaken(draw: random.Random, line: str) -> str:
    """Return a line with one number changed: an operand, the result (also among the numbers left), or a number left."""
    numbers = re.findall(r"\d+", line)
    place = _below(draw, len(numbers))
    wrong = str(1 + _below(draw, LARGEST))
    if draw.random() < 0.5:  # near the right one
        wrong = str(max(1, int(numbers[place]) + 1 + _below(draw, 3) - 5 * _below(draw, 2)))
    if place == 2:
        left = [int(wrong) if number == numbers[2] else int(number) for number in numbers[3:]]
        return re.sub(r"=.*", f"={wrong};{_listed(tuple(sorted(left)))}", line)
    parts = iter([*numbers[:place], wrong, *numbers[place + 1 :]])
    return re.sub(r"\d+", lambda _: next(parts), line)


class CountdownRollouts(CountdownWindows):
    """Rows of one problem each for `train.objective=grpo`, which draws answers."""

    def _sequences(self, key, length):
        """Yield the question and the right answer of one problem."""
        yield self._fitting(random.Random(key), length)

    def _answer(self, draw, numbers, target, path):
        """Return the lines of the right answer."""
        return [(f"{line}\n?y", True) for line, _ in path]


def _walk(draw: random.Random, numbers: State, count: int) -> Moves:
    """Return this many random moves, one after the other."""
    path = []
    for _ in range(count):
        options = moves(numbers)
        path.append(options[_below(draw, len(options))])
        numbers = path[-1][1]
    return path


def _results(larger: int, smaller: int) -> Iterator[tuple[str, int]]:
    """Yield (operation, result) of two numbers; a factor or divisor of 1 changes nothing, and is left out."""
    if larger + smaller <= LARGEST:
        yield f"{larger}+{smaller}", larger + smaller
    if larger > smaller:
        yield f"{larger}-{smaller}", larger - smaller
    if smaller > 1 and larger * smaller <= LARGEST:
        yield f"{larger}*{smaller}", larger * smaller
    if smaller > 1 and larger % smaller == 0:
        yield f"{larger}/{smaller}", larger // smaller


def _below(draw: random.Random, bound: int) -> int:
    """Return a random integer from 0 to bound - 1; only `random()` draws the same in every version of Python."""
    return int(draw.random() * bound)


def _listed(numbers: State) -> str:
    return " ".join(map(str, numbers))
