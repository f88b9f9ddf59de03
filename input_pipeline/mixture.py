# SPDX-License-Identifier: Apache-2.0
"""Weighted mixtures: which part an example of the run is taken from, and which of the part's own examples it is.

With weights w_k, the first n examples contain n * w_k of part k, with an error below one, for every n. The weights are
fractions, so the choice repeats with the period of their common denominator, and a table of that length locates any
example in constant time. Each part has its own order of windows in each epoch. New weights begin a new section of the
run, in which every part continues at its position. A stream of tasks is a mixture whose sections have one part each.

An example is a position in the resulting order: 0, 1, ... . A run takes them in order but skips some ranges, such as
those on which it diverged. So the example that it takes as number t may have a higher position.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import accumulate, groupby
from math import lcm

import numpy as np

from input_pipeline.errors import DataError
from input_pipeline.windows import Windows, read_arrays

LONGEST_PERIOD = 100_000  # of a schedule; it allows weights of five digits
FOREVER = 1 << 62  # examples
EXAMPLE = "0.7 code/**/*.py; 0.3 books.jsonl"
TASKS = "a.txt:1000,b.txt:1000"
WEIGHT = re.compile(r"[0-9./]{1,40}([eE][+-]?[0-9]{1,4})?")  # 10**99999999 would be computed for 1e-99999999
SEVERAL = re.compile(r", *[0-9.]+ ")  # parts with a comma between them

Weights = tuple[Fraction, ...]
History = tuple[tuple[int, Weights], ...]


def parse(text: str) -> tuple[list[str], Weights]:
    """Return the paths and the weights of data.mixture, scaled to a sum of 1.

    Raises DataError if it cannot be read, or if weights have more digits than a schedule allows.
    """
    paths, weights = [], []
    for part in filter(None, map(str.strip, text.split(";"))):
        weight, path = _parse_part(part)
        if path in paths:
            raise DataError(f"data.mixture names {path} twice; add up its weights")
        paths.append(path)
        weights.append(weight)
    if not sum(weights):
        raise DataError(f"data.mixture={text!r} gives no part a weight; write, for example, {EXAMPLE!r}")
    scaled = tuple(weight / sum(weights) for weight in weights)
    period = _period(scaled)
    if period > LONGEST_PERIOD:
        raise DataError(
            f"data.mixture={text!r}: the order of parts repeats only after more than {LONGEST_PERIOD:,} examples; "
            "use weights with fewer digits"
        )
    return paths, scaled


def _parse_part(part: str) -> tuple[Fraction, str]:
    weight, path = (*part.split(maxsplit=1), "")[:2]
    try:
        fraction = Fraction(weight if WEIGHT.fullmatch(weight) else -1)
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(-1)
    if fraction < 0 or not path or SEVERAL.search(path):
        raise DataError(f"data.mixture: {part!r} is not a weight and a path; write, for example, {EXAMPLE!r}")
    return fraction, path.strip()


def parse_stream(text: str) -> tuple[list[str], History]:
    """Return the paths of data.stream, each once, and the sections of the run: one path at a time.

    After the last task's examples its path continues. A path that returns continues at its position. Raises DataError
    if it cannot be read.
    """
    tasks = [task.strip().rpartition(":") for task in text.split(",")]
    for path, _, count in tasks:
        if not path or not re.fullmatch(r"[1-9]\d{0,17}", count):
            raise DataError(f"data.stream={text!r} must be paths with a number of examples each, such as {TASKS!r}")
    paths = list(dict.fromkeys(path for path, *_ in tasks))
    firsts = [0, *accumulate(int(count) for *_, count in tasks)]
    alone = {path: tuple(Fraction(path == other) for other in paths) for path in paths}
    sections = [(first, alone[path]) for first, (path, *_) in zip(firsts, tasks, strict=False)]
    return paths, tuple(next(same) for _, same in groupby(sections, key=lambda section: section[1]))


class Schedule:
    """Which part each of the examples 0, 1, ... is taken from, by fixed weights.

    Source: Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980). Of the parts that one more
    example would not put too far ahead, it takes the one that would first fall too far behind. With K parts no part
    ever deviates from its share by more than 1 - 1 / (2K - 2).
    """

    def __init__(self, weights: Weights):
        self._period = period = _period(weights)
        shares = [int(weight * period) for weight in weights]
        spread = 2 * max(len(weights), 2) - 2
        taken, chosen, ranks = [0] * len(weights), [], []
        for number in range(1, period + 1):
            # How far behind each part would be without this example, in units of 1 / (period * spread).
            behind = [(number * share - count * period) * spread for share, count in zip(shares, taken, strict=True)]
            until_late = {
                part: (period * (spread - 1) - lag) // (shares[part] * spread)
                for part, lag in enumerate(behind)
                if lag >= period
            }
            part = min(until_late, key=until_late.get)
            chosen.append(part)
            ranks.append(taken[part])
            taken[part] += 1
        self._parts, self._ranks, self._taken = np.array(chosen), np.array(ranks), np.array(taken)

    def locate(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (the part of each example, how many examples were taken from that part before)."""
        periods, places = np.divmod(examples, self._period)
        parts = self._parts[places]
        return parts, periods * self._taken[parts] + self._ranks[places]

    def taken(self, number: int) -> np.ndarray:
        """Return how many of the first `number` examples are taken from each part."""
        periods, place = divmod(number, self._period)
        return periods * self._taken + np.bincount(self._parts[:place], minlength=len(self._taken))


_schedule = cache(Schedule)


@dataclass(frozen=True)
class Mixture:
    """The training data of a run: window sources, the history of their weights, and skipped examples."""

    parts: tuple[Windows, ...]  # all parts give the same arrays
    history: History  # first example and weights of each section, from example 0 on
    skips: tuple[tuple[int, int], ...] = ()  # (examples taken and skipped before it, number skipped)

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays of a batch, in order."""
        return tuple(self.parts[0].fills)

    @property
    def used(self) -> list[int]:
        """The numbers of the parts that are read, from 0; a part of weight 0 is not."""
        return [number for number in range(len(self.parts)) if any(weights[number] for _, weights in self.history)]

    @property
    def num_tokens(self) -> int:
        return sum(self.parts[number].num_tokens for number in self.used)

    def num_examples(self, sequence_length: int) -> int:
        """Return how many windows there are in all parts that are read."""
        return sum(self.parts[number].num_examples(sequence_length) for number in self.used)

    def read(self, taken: np.ndarray, sequence_length: int, seed: int) -> dict[str, np.ndarray]:
        """Return the content of the examples that the run takes as number `taken`, as a window source does.

        Each is a pure function of (seed, its number, the mixture).
        """
        parts, windows = self.windows(self.examples(taken), sequence_length, seed)
        batch = {}
        for number in np.unique(parts).tolist():
            rows = parts == number
            for key, values in read_arrays(self.parts[number], windows[rows], sequence_length).items():
                batch.setdefault(key, np.zeros((len(parts), *values.shape[1:]), values.dtype))[rows] = values
        return batch

    def examples(self, taken: np.ndarray) -> np.ndarray:
        """Return the examples that the run takes as number `taken`, counted from 0: int64 of the same shape."""
        taken = np.asarray(taken, np.int64)
        return taken + sum(count * (first <= taken) for first, count in self.skips)

    def windows(self, examples: np.ndarray, sequence_length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (the part of each example, its window in the part): int64 of the same shape."""
        parts, indices = self.locate(examples)
        windows = np.zeros_like(indices)
        for number in np.unique(parts).tolist():
            rows, order = parts == number, seed + (number << 32)  # each part has its own; the first part's is the seed
            windows[rows] = self.parts[number].order(indices[rows], sequence_length, order)
        return parts, windows

    def locate(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (the part of each example, its number among those of the part), in constant time each."""
        examples = np.asarray(examples, np.int64)
        parts, indices = np.zeros_like(examples), np.zeros_like(examples)
        done = np.zeros(len(self.parts), np.int64)
        lasts = [first for first, _ in self.history[1:]] + [FOREVER]
        for (first, weights), last in zip(self.history, lasts, strict=True):
            inside, schedule = (first <= examples) & (examples < last), _schedule(weights)
            parts[inside], indices[inside] = schedule.locate(examples[inside] - first)
            indices[inside] += done[parts[inside]]
            done = done + schedule.taken(last - first)
        return parts, indices

    def resume(self, stored: list | None, taken: int, skips: Iterable[Iterable[int]] = ()) -> "Mixture":
        """Return this mixture resumed from an earlier run: with its sections and skips, and with ours from here.

        Args:
            stored: result of `record` in the earlier run, which has the same parts; None: it had these weights.
            taken: number of examples that the run has consumed.
            skips: of the earlier run.
        """
        earlier = self.recorded(stored or self.record(), skips)
        example = int(earlier.examples(taken))
        weights = [weights for first, weights in self.history if first <= example][-1]
        history = [section for section in earlier.history if section[0] < example]
        if not history or history[-1][1] != weights:
            history.append((example, weights))
        return replace(earlier, history=(*history, *(section for section in self.history if section[0] > example)))

    def recorded(self, stored: list, skips: Iterable[Iterable[int]]) -> "Mixture":
        """Return the mixture of these parts whose `record` and skips were stored as JSON.

        Raises DataError if the record does not describe a mixture of this many parts.
        """
        history = tuple((first, tuple(map(_stored_weight, weights))) for first, weights in stored)
        firsts = [first for first, _ in history]
        for _, weights in history:
            if len(weights) != len(self.parts) or sum(weights) != 1 or _period(weights) > LONGEST_PERIOD:
                raise DataError(f"the stored mixture has invalid weights for {len(self.parts)} parts: {weights!s:.80}")
        if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)):
            raise DataError(f"the stored mixture has sections that begin at {firsts!s:.80}; they must ascend from 0")
        return replace(self, history=history, skips=tuple((first, count) for first, count in skips))

    def skip(self, first: int, last: int) -> "Mixture":
        """Return this mixture without the examples of numbers first:last (taken, or to be taken, by the run).

        The new skip absorbs skips within the range; later skips apply last - first examples sooner.

        Args:
            first: the first number to skip; the run rolls back to where it had taken at most this many.
            last: the first number that is not skipped, taken in place of `first`; at least `first`.
        """
        assert first <= last, f"cannot skip from {first} to {last}"
        begin, end = self.examples([first, last]).tolist()
        before = [skip for skip in self.skips if skip[0] <= first]
        after = [(taken - (last - first), count) for taken, count in self.skips if taken > last]
        return replace(self, skips=(*before, (first, end - begin), *after))

    def record(self) -> list:
        """Return the history as JSON-serialisable values."""
        return [[first, list(map(str, weights))] for first, weights in self.history]


def _stored_weight(text: str) -> Fraction:
    if not re.fullmatch(r"\d{1,6}(/[1-9]\d{0,5})?", text):
        raise DataError(f"the stored mixture has the weight {text!r:.80}, which is not a fraction")
    return Fraction(text)


def _period(weights: Weights) -> int:
    return lcm(*(weight.denominator for weight in weights))
