# SPDX-License-Identifier: Apache-2.0
"""Reads stored conversations as examples: rows of several conversations, each in its own segment, or pairs of answers.

In a sequence of n tokens the first n - 1 are inputs and the last n - 1 are targets. Targets that are not learned are
IGNORED, with weight 0 in every loss. A sequence longer than a row is truncated; `packing_summary` counts these.
"""

from functools import lru_cache

import numpy as np

from input_pipeline.chat.encoding import IDS, LEARNED, SECOND
from input_pipeline.errors import DataError
from input_pipeline.packing import Piece, empty_rows, num_places, put_sequence
from input_pipeline.shards import TokenWindows


class ConversationWindows(TokenWindows):
    """Conversations packed into rows by best fit; no conversation is split between two rows."""

    what = "conversations"

    def __init__(self, *stored):
        super().__init__(*stored)
        self._layout, self._num_lost = lru_cache(2)(self._packed), lru_cache(2)(self._count_lost)
        self._sizes = np.diff(self._starts, append=self.num_tokens) - 1  # in tokens, without the end of document

    def num_examples(self, sequence_length: int) -> int:
        return len(self._layout(sequence_length))

    def read(self, indices: np.ndarray, sequence_length: int) -> dict[str, np.ndarray]:
        """Return rows with the arrays of `packing.pack`, int32 [len(indices), T] each; some targets are IGNORED."""
        batch = empty_rows(len(indices), sequence_length)
        for row, index in enumerate(np.asarray(indices).tolist()):
            first = 0
            for number, tokens in enumerate(self._sequences(index, sequence_length), start=1):
                first = put_sequence(batch, row, first, number, tokens & IDS, tokens & LEARNED)
        return batch

    def pieces(self, index: int, sequence_length: int) -> list[Piece]:
        """Return the conversations in a row; the first token of each is not a target."""
        found, first = [], 0
        for number, document in enumerate(self._layout(sequence_length)[index], start=1):
            count = min(num_places(int(self._sizes[document])), sequence_length)
            found.append(Piece(document, number, first, count, offset=1))
            first += count
        return found

    def packing_summary(self, sequence_length: int) -> str:
        """Return a line about the rows, how full they are, truncated conversations, and those without an answer."""
        places, rows = self._places(), self.num_examples(sequence_length)
        full = np.minimum(places, sequence_length).sum() / (rows * sequence_length)
        line = f"{self.num_documents:,} {self.what} in {rows:,} rows, {full:.0%} full"
        cut, lost = (places > sequence_length).sum(), self._num_lost(sequence_length)
        line += f"; {cut:,} are longer than train.sequence_length and truncated" if cut else ""
        return line + (f", {lost:,} of them before any answer, so they have no weight" if lost else "")

    def check_counts(self, sequence_length: int) -> None:
        """Raise DataError if truncation removes every answer, so that no target has weight in a loss."""
        if self._num_lost(sequence_length) == self.num_documents:
            raise DataError(
                f"train.sequence_length={sequence_length} truncates all {self.num_documents:,} {self.what} before an "
                "answer, so nothing is left to learn or to evaluate; use a longer one"
            )

    def _count_lost(self, sequence_length: int) -> int:
        """Return the number of documents in which a sequence has no learned token left after truncation."""
        longer = np.flatnonzero(self._places() > sequence_length).tolist()
        return sum(not all((side[1:] & LEARNED).any() for side in self._cut(n, sequence_length)) for n in longer)

    def _places(self) -> np.ndarray:
        """Return the length in a row of each document, without truncation."""
        return np.maximum(self._sizes - 1, 0)

    def _cut(self, document: int, sequence_length: int) -> list[np.ndarray]:
        """Return the sequences of a document, truncated for a row, with marks; each has one token more than inputs."""
        return [self._tokens(document)[: sequence_length + 1]]

    def _sequences(self, index: int, sequence_length: int) -> list[np.ndarray]:
        """Return the tokens of each segment of a row, with marks; each has one token more than its inputs."""
        documents = self._layout(sequence_length)[index]
        return [sequence for document in documents for sequence in self._cut(document, sequence_length)]

    def _tokens(self, document: int) -> np.ndarray:
        tokens = np.zeros(self._sizes[document], np.int32)
        self._copy(int(self._starts[document]), tokens)
        return tokens

    def _packed(self, sequence_length: int) -> list[list[int]]:
        """Return the documents of each row by best fit: longest first, each into the fullest row that fits it."""
        rows: list[list[int]] = []
        with_room = [[] for _ in range(sequence_length + 1)]  # rows by their number of free places
        some = 0  # bit n: whether there are rows with n free places
        sizes = np.minimum(self._places(), sequence_length)
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
    """Pairs of answers to one prompt, one per row: the chosen answer is segment 1, the rejected one segment 2."""

    what = "pairs"

    def pieces(self, index: int, sequence_length: int) -> list[Piece]:
        """Return both sequences of a row; the first token of each is not a target."""
        found, first, offset = [], 0, 1
        num_chosen = len(self._sides(index)[0])
        for number, tokens in enumerate(self._sequences(index, sequence_length), start=1):
            found.append(Piece(index, number, first, num_places(len(tokens)), offset))
            first, offset = first + num_places(len(tokens)), num_chosen + 1
        return found

    def _packed(self, sequence_length: int) -> np.ndarray:
        return np.arange(self.num_documents)[:, None]

    def _places(self) -> np.ndarray:
        return np.maximum(self._sizes - 2, 0)

    def _sides(self, document: int) -> list[np.ndarray]:
        tokens = self._tokens(document)
        second = tokens & SECOND > 0
        return [tokens[~second], tokens[second]]

    def _cut(self, document: int, sequence_length: int) -> list[np.ndarray]:
        """Return both sequences with marks; if they are too long for a row, each keeps at least half of it.

        The chosen one has the odd place.
        """
        chosen, rejected = sides = self._sides(document)
        half = sequence_length // 2
        most = half, sequence_length - half  # of the other side
        others = zip((rejected, chosen), most, strict=True)
        rooms = [sequence_length - min(num_places(len(other)), m) for other, m in others]
        return [side[: room + 1] for side, room in zip(sides, rooms, strict=True)]
