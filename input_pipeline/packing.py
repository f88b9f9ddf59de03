# SPDX-License-Identifier: Apache-2.0
"""Packing: documents end to end, cut in windows, with segments and positions; no token lost, none twice.

The stored stream is document 1, end of document (EOD), document 2, EOD, ... . An EOD before the first
token makes each stored token a target exactly once: window i reads as inputs positions iT to iT+T-1 of
the stream with that EOD in front, and as targets the T stored tokens iT to iT+T-1. The EOD in front of a
document is its first input.
"""

import itertools
from typing import NamedTuple

import numpy as np

KEYS = ("tokens", "targets", "segments", "positions")


class Piece(NamedTuple):
    """A run of one document's tokens among the targets of a window."""

    document: int  # its number in the stored stream
    segment: int  # its number in the window, as `pack` counts
    first: int  # place of the first token in the window
    count: int  # of tokens; an EOD is a document's last
    offset: int  # place of the first token in the document


def pieces(begin: int, length: int, starts: np.ndarray, num_tokens: int) -> list[Piece]:
    """Return what `pack` finds in one window, in order; arguments as there, `length` tokens from `begin` on."""
    end = min(begin + length, num_tokens)
    number = int(np.searchsorted(starts, begin, side="right")) - 1
    stop = int(np.searchsorted(starts, end, side="left"))
    borders = [begin, *starts[number + 1 : stop].tolist(), end]
    return [
        Piece(number + nth, nth + 1, first - begin, last - first, first - int(starts[number + nth]))
        for nth, (first, last) in enumerate(itertools.pairwise(borders))
    ]


def pack(stream: np.ndarray, begins: np.ndarray, starts: np.ndarray, num_tokens: int) -> dict[str, np.ndarray]:
    """Add to windows of the stream which document each token belongs to, and where in it.

    Args:
        stream: int32 [rows, T + 1], the stored tokens begins[row] - 1 to begins[row] + T - 1; anything
            at places outside the stored stream but for place -1, which is EOD.
        begins: int64 [rows], the first target of each window.
        starts: int64 [documents], ascending: the first token of each document in the stored stream.
        num_tokens: length of the stored stream.

    Returns:
        int32 [rows, T] each: `tokens`, `targets`, `segments` (1, 2, ... in a window; 0 after the end of
        the stream, where all four are 0), `positions` (from 0 at the first token of a segment in the window).
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
