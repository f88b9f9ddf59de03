# SPDX-License-Identifier: Apache-2.0
"""The interface of window sources: the arrays that they give, and the order in which their examples are taken."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from input_pipeline.order import example_windows
from input_pipeline.packing import KEYS, Piece
from input_pipeline.tokenization import AnyTokenizer


class Windows:
    """The base of window sources, from which mixtures and batches take examples.

    A subclass adds `read(indices, sequence_length)`, which returns int32 arrays [len(indices), ...] by name. If a
    window is not a document of its own, the subclass overrides `pieces`.

    Attributes:
        digest: text that differs for other data, also for other sizes of it; a resumed run must have the same.
        fills: {array that `read` returns: its value in rows of padding}, in order.
        batch_exceeds_pass: whether a batch may be larger than an epoch, and so contain a window twice.
        segment: of a window's one piece; 0 if a window has several documents, made together, that are one piece.
        num_documents, num_tokens, num_bytes (of UTF-8 text): the size of the data.
        vocab_size: number of tokens if the source has its own alphabet; 0 for tokens of a tokenizer or of the model.
        num_identifiers: rows that a table of puzzle embeddings needs.
        tokenizer: of the texts, if the source encodes them itself.
        input_dim: numbers of an input, if examples are vectors; 0: they are tokens.
        largest_input: the largest integer of an input, if examples are rows of integers with a label; 0: they are not.
        test_puzzles: {name: task}, if the answers to the windows of a task are votes; most sources have none.
    """

    digest: str
    fills: Mapping[str, int] = dict.fromkeys(KEYS, 0)
    batch_exceeds_pass = False
    segment = 1
    num_documents = num_tokens = num_bytes = num_identifiers = vocab_size = input_dim = largest_input = 0
    tokenizer: AnyTokenizer | None = None
    test_puzzles: Mapping[str, dict] = MappingProxyType({})

    def num_examples(self, sequence_length: int) -> int:
        """Return the number of examples in an epoch."""
        return self.num_tokens // sequence_length

    def read(self, indices: np.ndarray, sequence_length: int) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def pieces(self, index: int, sequence_length: int) -> list[Piece]:
        """Return the parts of documents in a window."""
        return [Piece(document=index, segment=self.segment, first=0, count=sequence_length, offset=0)]

    def order(self, indices: np.ndarray, sequence_length: int, seed: int) -> np.ndarray:
        """Return the window of each example in `indices`: int64 of the same shape, a pure function of the arguments."""
        return example_windows(indices, self.num_examples(sequence_length), seed)

    def check_counts(self, sequence_length: int) -> None:
        """Raise DataError if no target of any window has weight in the loss."""

    def packing_summary(self, sequence_length: int) -> str:
        """Return a line for the user about how documents were packed into windows; "" if there is nothing to report."""
        return ""

    def document_name(self, document: int) -> str:
        """Return a name for a document whose own name was not kept."""
        return f"document {document}"


def read_arrays(source: Windows, indices: np.ndarray, sequence_length: int) -> dict[str, np.ndarray]:
    """Return what a source reads; TypeError if these are not the int32 arrays that its `fills` names."""
    arrays, wanted = source.read(indices, sequence_length), f"int32[{len(indices)}]"
    found = type(arrays).__name__
    if isinstance(arrays, dict):
        found = {name: f"{np.asarray(array).dtype}{list(np.shape(array)[:1])}" for name, array in arrays.items()}
    if found != dict.fromkeys(source.fills, wanted):
        raise TypeError(
            f"{type(source).__name__}.read returned {found} (only first dimensions are shown); it must "
            f"return {wanted} for each name of `fills`: {', '.join(source.fills)}"
        )
    return arrays
