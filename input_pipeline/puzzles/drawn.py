# SPDX-License-Identifier: Apache-2.0
"""Puzzles made at random, and split so that no version of a held-out one is trained on."""

import hashlib
import itertools
from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

import numpy as np

from input_pipeline.errors import DataError
from input_pipeline.progress import progress
from input_pipeline.threads import in_threads

BATCH = 128  # puzzles made at once, fewer where fewer are asked for
BARREN_BATCHES = 8  # in a row; then there are no others
LEAST_SHARE = 1 / 8  # of forms on either side, so that few forms leave both something


class Drawn(NamedTuple):
    """Puzzles made at random."""

    questions: np.ndarray  # tokens [N, cells]
    answers: np.ndarray  # the same
    ratings: np.ndarray  # int [N], how hard each is
    forms: list[bytes]  # what each has in common with all its augmentations


class Puzzles(NamedTuple):
    """Different puzzles: tokens, uint8 [N, cells] each."""

    questions: np.ndarray
    answers: np.ndarray


class _Side:
    """What was kept of one side of the split."""

    def __init__(self, wanted: int):
        self.wanted, self.kept, self.forms = wanted, {}, set()

    def add(self, question: np.ndarray, answer: np.ndarray, form: bytes) -> bool:
        """Keep a puzzle if it is wanted and new, and return whether it was."""
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
    """Return `train` and `heldout` puzzles, all different, no form of one among those of the other.

    Which side a form is on is a hash of it and of the seed. Puzzles are made in batches, each from a seed of its own,
    by as many threads as there are cores; the result does not depend on how many.

    Args:
        make: (generator, number) -> so many puzzles at random, or fewer.
        name: of what is made, a plural.
        settings: that a user may change for there to be more, as a message names them.

    Raises:
        DataError: there seem to be too few.
    """
    size = min(BATCH, train + heldout)
    share = min(max(heldout / (train + heldout), LEAST_SHARE), 1 - LEAST_SHARE)
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
    known = [f"{len(side.kept):,} of {len(side.forms):,} forms" for side in sides]
    announce(f"made {name}: {known[0]} to train on, {known[1]} held out; none is on both sides, however augmented")
    return sides[0].puzzles(), sides[1].puzzles()


def _is_held_out(form: bytes, seed: int, share: float) -> bool:
    number = int.from_bytes(hashlib.blake2b(form, digest_size=8, salt=seed.to_bytes(8, "little")).digest(), "little")
    return number < share * 2**64


def _too_few(sides: tuple[_Side, _Side], name: str, settings: str, hardest: int) -> DataError:
    train, heldout = sides
    if not train.kept or not heldout.kept:
        advice = f"of what was made none is harder than {hardest}; change one of {settings}"
    else:
        fewer = f"--config.data.puzzle_count={len(train.kept)} --config.data.puzzle_heldout={len(heldout.kept)}"
        advice = f"use {fewer}, or change one of {settings}"
    return DataError(
        f"data.puzzle_count={train.wanted} and data.puzzle_heldout={heldout.wanted} are more {name} than there are: "
        f"found {len(train.kept):,} to train on and {len(heldout.kept):,} to hold out, of {len(train.forms)} and "
        f"{len(heldout.forms)} forms; {advice}"
    )
