# SPDX-License-Identifier: Apache-2.0
"""What every window source has in common: the arrays it gives, and the order in which it is gone through."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from input_pipeline.order import example_windows
from input_pipeline.packing import KEYS, Piece


class Windows:
    """Examples that a mixture takes and batches are made of.

    A window source adds `num_examples(sequence_length)`, how many a pass has, `read(indices, sequence_length)`, which
    gives int32 arrays [len(indices), ...] by name, and `pieces(index, sequence_length)`, what a window is made of.

    Attributes:
        fills: the arrays that `read` gives, in order, and of each the value in rows that stand for no window.
        batch_exceeds_pass: whether a batch may be larger than a pass, and so hold a window twice.
        num_documents, num_tokens, num_bytes (of UTF-8 text): how much there is.
        vocab_size: tokens of an alphabet of their own; 0: a tokenizer's, or as many as the model has.
        num_identifiers: rows that a table of puzzle embeddings needs.
        test_puzzles: tasks by name for which the answers to windows are votes; most sources have none.
    """

    fills: Mapping[str, int] = dict.fromkeys(KEYS, 0)
    batch_exceeds_pass = False
    num_documents = num_tokens = num_bytes = num_identifiers = vocab_size = 0
    test_puzzles: Mapping[str, dict] = MappingProxyType({})

    def num_examples(self, sequence_length: int) -> int:
        raise NotImplementedError

    def read(self, indices: np.ndarray, sequence_length: int) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def pieces(self, index: int, sequence_length: int) -> list[Piece]:
        raise NotImplementedError

    def order(self, indices: np.ndarray, sequence_length: int, seed: int) -> np.ndarray:
        """Return the window that is taken as example number `indices`: int64 of the same shape, a pure function."""
        return example_windows(indices, self.num_examples(sequence_length), seed)

    def check_counts(self, sequence_length: int) -> None:
        """Raise DataError where nothing in any window would count in a loss."""

    def packing_summary(self, sequence_length: int) -> str:
        """Return a line for the user on how documents were packed into windows; "" if there is nothing to say."""
        return ""

    def document_name(self, document: int) -> str:
        """Return what a document is called whose name was not kept."""
        return f"document {document}"
