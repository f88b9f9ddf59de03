# SPDX-License-Identifier: Apache-2.0
"""Rows of texts that are generated at random: the base of the window sources without files."""

from collections.abc import Iterator

import numpy as np

from input_pipeline.order import mix
from input_pipeline.packing import empty_rows, put_sequence
from input_pipeline.tasks.hashes import stream_key
from input_pipeline.windows import Windows

TOKENS = {"train": 1 << 32, "heldout": 1 << 17}  # of a pass, by stream


class GeneratedRows(Windows):
    """Rows of generated texts, each in a segment of its own; some targets are IGNORED.

    A row is a pure function of seed, stream, index, length and what a subclass adds.
    """

    batch_exceeds_pass, segment = True, 0

    def __init__(self, seed: int, stream: str):
        self.stream, self.num_tokens, self._key = stream, TOKENS[stream], stream_key(seed, stream)

    def read(self, indices: np.ndarray, sequence_length: int) -> dict[str, np.ndarray]:
        """Return rows with the arrays of `packing.pack`, int32 [len(indices), T] each."""
        batch = empty_rows(len(indices), sequence_length)
        for row, key in enumerate(self._keys(indices)):
            first = 0
            for number, (tokens, is_learned) in enumerate(self._sequences(key, sequence_length), start=1):
                first = put_sequence(batch, row, first, number, tokens, np.asarray(is_learned))
        return batch

    def check_counts(self, sequence_length: int) -> None:
        """Raise DataError if no text fits in a row."""
        self.read(np.zeros(1, np.int64), sequence_length)

    def _keys(self, indices: np.ndarray) -> list[int]:
        """Return the 64 random bits of each row."""
        return (mix(np.asarray(indices, np.uint64)) ^ self._key).tolist()

    def _sequences(self, key: int, length: int) -> Iterator[tuple]:
        """Yield (tokens, which of them are learned) of each text of a row of `length` tokens."""
        raise NotImplementedError
