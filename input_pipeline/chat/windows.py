# SPDX-License-Identifier: Apache-2.0
"""Stored conversations as examples: several to a row, each whole and in a segment of its own, or a pair of answers.

Of a sequence of n tokens the first n - 1 are read and the last n - 1 are targets; those that are not learned are
IGNORED, which weighs nothing in any loss. What is longer than a row is cut at its end; `packing_summary` counts these.
"""

from functools import lru_cache

import numpy as np

from input_pipeline.chat.encoding import IDS, LEARNED, SECOND
from input_pipeline.errors import DataError
from input_pipeline.packing import KEYS, Piece
from input_pipeline.shards import TokenWindows

IGNORED = -1  # a target that does not count


class ConversationWindows(TokenWindows):
    """Conversations packed into rows: every row as full as best fit makes it, no conversation in two."""

    what = "conversations"

    def __init__(self, *stored):
        super().__init__(*stored)
        self._layout, self._num_lost = lru_cache(2)(self._packed), lru_cache(2)(self._count_lost)
        self._sizes = np.diff([*self._starts, self.num_tokens]) - 1  # in tokens; the store ends each with one more

    def num_examples(self, sequence_length: int) -> int:
        return len(self._layout(sequence_length))

    def read(self, indices: np.ndarray, sequence_length: int) -> dict[str, np.ndarray]:
        """Return rows as `packing.pack` does, int32 [len(indices), T] each, but for targets that are IGNORED."""
        batch = {key: np.zeros((len(indices), sequence_length), np.int32) for key in KEYS}
        for row, index in enumerate(np.asarray(indices).tolist()):
            first = 0
            for number, tokens in enumerate(self._sequences(index, sequence_length), start=1):
                places = slice(first, first := first + len(tokens) - 1)
                batch["tokens"][row, places] = tokens[:-1] & IDS
                batch["targets"][row, places] = np.where(tokens[1:] & LEARNED, tokens[1:] & IDS, IGNORED)
                batch["segments"][row, places] = number
                batch["positions"][row, places] = np.arange(len(tokens) - 1)
        return batch

    def pieces(self, index: int, sequence_length: int) -> list[Piece]:
        """Return which conversations are in a row; a conversation's first token is no target."""
        found, first = [], 0
        for number, document in enumerate(self._layout(sequence_length)[index], start=1):
            count = min(int(self._sizes[document]) - 1, sequence_length)
            found.append(Piece(document, number, first, count, offset=1))
            first += count
        return found

    def packing_summary(self, sequence_length: int) -> str:
        """Return a line on rows, their fill, truncated conversations, and those that lost all answers."""
        places, rows = self._places(), self.num_examples(sequence_length)
        full = np.minimum(places, sequence_length).sum() / (rows * sequence_length)
        line = f"{self.num_documents:,} {self.what} in {rows:,} rows, {full:.0%} full"
        cut, lost = (places > sequence_length).sum(), self._num_lost(sequence_length)
        line += f"; {cut:,} are longer than train.sequence_length and cut at their end" if cut else ""
        return line + (f", {lost:,} of them before an answer, and so count for nothing" if lost else "")

    def check_counts(self, sequence_length: int) -> None:
        """Raise DataError where every answer is cut off, so that nothing counts in any loss."""
        if self._num_lost(sequence_length) == self.num_documents:
            raise DataError(
                f"train.sequence_length={sequence_length} cuts off every answer of the {self.num_documents:,} "
                f"{self.what}, and nothing is left to learn or to evaluate; use a longer one"
            )

    def _count_lost(self, sequence_length: int) -> int:
        """Return how many have nothing left that is learned, or of a pair on one of its sides."""
        longer = np.flatnonzero(self._places() > sequence_length).tolist()
        return sum(not all((side[1:] & LEARNED).any() for side in self._cut(n, sequence_length)) for n in longer)

    def _places(self) -> np.ndarray:
        """Return how many places of a row each document takes, cut nowhere."""
        return self._sizes - 1

    def _cut(self, document: int, sequence_length: int) -> list[np.ndarray]:
        """Return the sequences of a document with marks, cut for a row, one token more than each takes places."""
        return [self._tokens(document)[: sequence_length + 1]]

    def _sequences(self, index: int, sequence_length: int) -> list[np.ndarray]:
        """Return the tokens of each segment of a row, with marks, one more than it takes places."""
        documents = self._layout(sequence_length)[index]
        return [sequence for document in documents for sequence in self._cut(document, sequence_length)]

    def _tokens(self, document: int) -> np.ndarray:
        tokens = np.zeros(self._sizes[document], np.int32)
        self._copy(int(self._starts[document]), tokens)
        return tokens

    def _packed(self, sequence_length: int) -> list[list[int]]:
        """Return the documents of each row: the longest first, each where the least room is left that it fits in."""
        rows: list[list[int]] = []
        with_room = [[] for _ in range(sequence_length + 1)]  # rows by the places that are free in them
        some = 0  # bit n: whether there are rows with n free places
        sizes = np.minimum(self._sizes - 1, sequence_length)
        for document in np.argsort(-sizes, kind="stable").tolist():
            size = int(sizes[document])
            enough = some >> size
            room = size + (enough & -enough).bit_length() - 1 if enough else sequence_length
            if enough:
                row = with_room[room].pop()
                some ^= 0 if with_room[room] else 1 << room
            else:
                row = len(rows)
                rows.append([])
            rows[row].append(document)
            with_room[room - size].append(row)
            some |= 1 << (room - size)
        return rows


class PreferenceWindows(ConversationWindows):
    """Pairs of answers to one prompt, a pair a row: what is chosen is segment 1, what is rejected segment 2."""

    what = "pairs"

    def pieces(self, index: int, sequence_length: int) -> list[Piece]:
        """Return both sequences of a row's pair, their first tokens being no targets."""
        found, first, offset = [], 0, 1
        whole = [len(sequence) for sequence in self._sides(index)]
        for number, tokens in enumerate(self._sequences(index, sequence_length), start=1):
            found.append(Piece(index, number, first, len(tokens) - 1, offset))
            first, offset = first + len(tokens) - 1, whole[0] + 1
        return found

    def _packed(self, sequence_length: int) -> np.ndarray:
        return np.arange(self.num_documents)[:, None]

    def _places(self) -> np.ndarray:
        return self._sizes - 2

    def _sides(self, document: int) -> list[np.ndarray]:
        tokens = self._tokens(document)
        second = tokens & SECOND > 0
        return [tokens[~second], tokens[second]]

    def _cut(self, document: int, sequence_length: int) -> list[np.ndarray]:
        """Return both sequences with marks; where they are too long for a row, either has at least half of it."""
        chosen, rejected = sides = self._sides(document)
        half = sequence_length // 2
        rooms = [sequence_length - min(len(other) - 1, half) for other in (rejected, chosen)]
        return [side[: room + 1] for side, room in zip(sides, rooms, strict=True)]
