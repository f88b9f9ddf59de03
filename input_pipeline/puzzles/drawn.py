# SPDX-License-Identifier: Apache-2.0
"""Draws random puzzles, and splits them so that no version of a held-out puzzle is trained on."""

import hashlib
import itertools
from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

import numpy as np

from input_pipeline.errors import DataError
from input_pipeline.progress import progress
from input_pipeline.threads import in_threads

BATCH = 128  # puzzles per batch, or fewer if fewer are wanted
BARREN_BATCHES = 8  # without a new puzzle, in a row, before the search ends
LEAST_SHARE = 1 / 8  # of forms on either side, so that neither side is empty if there are few forms


class Drawn(NamedTuple):
    """Random puzzles."""

    questions: np.ndarray  # tokens [N, cells]
    answers: np.ndarray  # tokens [N, cells]
    ratings: np.ndarray  # int [N], the difficulty of each
    forms: list[bytes]  # an invariant of each, shared by all its augmentations


class Puzzles(NamedTuple):
    """Distinct puzzles: tokens, uint8 [N, cells] each."""

    questions: np.ndarray
    answers: np.ndarray


class _Side:
    """The puzzles of one side of the split."""

    def __init__(self, wanted: int):
        self.wanted, self.kept, self.forms = wanted, {}, set()

    def add(self, question: np.ndarray, answer: np.ndarray, form: bytes) -> bool:
        """Keep a puzzle if it is new and more are wanted; return whether it was kept."""
        key = question.tobytes()
        if self.full or key in self.kept:
            return False
        self.kept[key] = (question, answer)
        self.forms.add(form)
        return True

    @property
    def full(self) -> bool:
        return len(self.kept) >= self.wanted

    def puzzles(self) -> Puzzles:
        questions, answers = zip(*self.kept.values(), strict=True)
        return Puzzles(np.stack(questions).astype(np.uint8), np.stack(answers).astype(np.uint8))


def split(
    make: Callable[[np.random.Generator, int], Drawn], *, train: int, heldout: int, least_rating: int, seed: int,
    name: str, settings: str, announce: Callable[[str], object],
) -> tuple[Puzzles, Puzzles]:  # fmt: skip
    """Return `train` and `heldout` puzzles, all distinct; no form occurs on both sides.

    A hash of the form and the seed decides its side. Threads make batches of puzzles, each batch from its own seed; the
    result does not depend on the number of threads. Raises DataError if the search found too few puzzles.

    Args:
        make: (generator, number) -> that many random puzzles, or fewer.
        name: of the puzzles in messages, plural.
        settings: keys that allow more puzzles, for messages.
    """
    size, share = _drawing(train, heldout)
    sides, barren, hardest = (_Side(train), _Side(heldout)), 0, 0
    batches = in_threads(lambda number: make(np.random.default_rng([seed, number]), size), itertools.count())
    with progress(f"making {name}", train + heldout, announce, "puzzles") as advance, closing(batches):
        for batch in batches:
            hardest = max([hardest, *map(int, batch.ratings)])
            rated = (row for row in zip(*batch, strict=True) if row[2] >= least_rating)
            added = sum(sides[_is_held_out(form, seed, share)].add(*puzzle, form) for *puzzle, _, form in rated)
            advance(added)
            barren = 0 if added else barren + 1
            if all(side.full for side in sides):
                break
            if barren == BARREN_BATCHES:
                raise _too_few(sides, name, settings, hardest)
    known = [f"{len(side.kept):,} with {len(side.forms):,} different forms" for side in sides]
    announce(f"made {name}: {known[0]} to train on, {known[1]} held out; none is on both sides, nor any augmentation")
    return sides[0].puzzles(), sides[1].puzzles()


def _drawing(train: int, heldout: int) -> tuple[int, float]:
    """Return the puzzles of a batch, and which share of the forms is held out: they decide what is drawn."""
    share = heldout / (train + heldout)
    return min(BATCH, train + heldout), min(max(share, LEAST_SHARE), 1 - LEAST_SHARE)


def _is_held_out(form: bytes, seed: int, share: float) -> bool:
    number = int.from_bytes(hashlib.blake2b(form, digest_size=8, salt=seed.to_bytes(8, "little")).digest(), "little")
    return number < share * 2**64


def _too_few(sides: tuple[_Side, _Side], name: str, settings: str, hardest: int) -> DataError:
    train, heldout = sides
    if not train.kept or not heldout.kept:
        advice = f"the hardest puzzle found has difficulty {hardest}; change one of {settings}"
    elif _drawing(len(train.kept), len(heldout.kept)) == _drawing(train.wanted, heldout.wanted):
        fewer = f"--config.data.puzzle_count={len(train.kept)} --config.data.puzzle_heldout={len(heldout.kept)}"
        advice = f"use {fewer}, or change one of {settings}"
    else:  # with these counts, other puzzles would be drawn
        advice = f"use fewer, or change one of {settings}"
    return DataError(
        f"data.puzzle_count={train.wanted} and data.puzzle_heldout={heldout.wanted} are more {name} than there are: "
        f"found {len(train.kept):,} to train on and {len(heldout.kept):,} to hold out, of {len(train.forms)} and "
        f"{len(heldout.forms)} forms; {advice}"
    )
