# SPDX-License-Identifier: Apache-2.0
"""Packs documents end to end and cuts them into windows, with segments and positions.

The stored stream is document 1, end of document (EOD), document 2, EOD, ... . One more EOD precedes it, so that each
stored token is a target exactly once: the targets of window i are the T stored tokens iT to iT+T-1, and its inputs are
the tokens one place earlier. So the first input of a document is the EOD before it.
"""

import itertools
from typing import NamedTuple

import numpy as np

KEYS = ("tokens", "targets", "segments", "positions")
IGNORED = -1  # a target with weight 0


class Piece(NamedTuple):
    """Consecutive tokens of one document among the targets of a window."""

    document: int  # its number in the stored stream
    segment: int  # its number in the window, as `pack` counts; 0: it is the whole window, whatever is in it
    first: int  # index of the first token in the window
    count: int  # of tokens; an EOD is a document's last
    offset: int  # index of the first token in the document


def pieces(begin: int, length: int, starts: np.ndarray, num_tokens: int) -> list[Piece]:
    """Return the pieces of the window of `length` tokens from `begin` on, in order; see `pack` for the arguments."""
    end = min(begin + length, num_tokens)
    number = int(np.searchsorted(starts, begin, side="right")) - 1
    stop = int(np.searchsorted(starts, end, side="left"))
    borders = [begin, *starts[number + 1 : stop].tolist(), end]
    return [
        Piece(number + nth, nth + 1, first - begin, last - first, first - int(starts[number + nth]))
        for nth, (first, last) in enumerate(itertools.pairwise(borders))
    ]


def pack(stream: np.ndarray, begins: np.ndarray, starts: np.ndarray, num_tokens: int) -> dict[str, np.ndarray]:
    """Return windows of the stream, with the document and the position of each token.

    Args:
        stream: int32 [rows, T + 1], the stored tokens begins[row] - 1 to begins[row] + T - 1. Token -1 is EOD; tokens
            after the end of the stored stream are not used.
        begins: int64 [rows], the first target of each window.
        starts: int64 [documents], ascending: the first token of each document in the stored stream.
        num_tokens: length of the stored stream.

    Returns:
        int32 [rows, T] each: `tokens`, `targets`, `segments` (1, 2, ... in a window) and `positions` (from 0 at the
        first token of a segment in the window). After the end of the stream all four are 0.
    """
    rows, length = stream.shape[0], stream.shape[1] - 1
    first = np.searchsorted(starts, begins, side="right")
    counts = np.searchsorted(starts, begins + length, side="left") - first
    # Documents that start after a window's first token: `counts` of them from number `first` on.
    row = np.repeat(np.arange(rows), counts)
    nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    is_start = np.zeros((rows, length), np.int32)
    is_start[row, starts[np.repeat(first, counts) + nth] - begins[row]] = 1

    steps = np.arange(length, dtype=np.int32)
    batch = {
        "tokens": stream[:, :-1],
        "targets": stream[:, 1:],
        "segments": 1 + np.cumsum(is_start, axis=1, dtype=np.int32),
        "positions": steps - np.maximum.accumulate(steps * is_start, axis=1),
    }
    if (begins + length > num_tokens).any():
        real = begins[:, None] + steps < num_tokens
        batch = {key: np.where(real, values, 0) for key, values in batch.items()}
    return {key: np.ascontiguousarray(values, np.int32) for key, values in batch.items()}


def empty_rows(rows: int, length: int) -> dict[str, np.ndarray]:
    """Return the arrays of `pack` without any token."""
    return {key: np.zeros((rows, length), np.int32) for key in KEYS}


def num_places(num_tokens: int) -> int:
    """Return the number of places that a sequence takes in a row; each token but the first is a target."""
    return max(0, num_tokens - 1)


def put_sequence(batch: dict[str, np.ndarray], row: int, first: int, segment: int, tokens, is_learned) -> int:
    """Write a sequence of n tokens into n - 1 places of a row from `first` on; return the place after them.

    A sequence without tokens takes no place. A tokenizer may leave nothing of a text of white space.

    Args:
        batch: of `empty_rows`.
        segment: its number in the row, from 1.
        tokens: int [n]; the inputs are all but the last one, the targets all but the first.
        is_learned: bool [n]; other targets are IGNORED.
    """
    places = slice(first, first + num_places(len(tokens)))
    batch["tokens"][row, places] = tokens[:-1]
    batch["targets"][row, places] = np.where(is_learned[1:], tokens[1:], IGNORED)
    batch["segments"][row, places] = segment
    batch["positions"][row, places] = np.arange(num_places(len(tokens)))
    return places.stop
