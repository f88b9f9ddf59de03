# SPDX-License-Identifier: Apache-2.0
"""One row of a large table for each puzzle, of which a batch uses few. B puzzles, E width of a row.

The rows start as zeros and have an optimizer of their own, see training/optimizers.py.
"""

import jax
from flax import nnx

from layers.axes import in_shards, zeros
from layers.shards import split_dims

ROWS = "puzzles"  # names the dimension of a table's rows


class PuzzleTable(nnx.Module):
    """Identifiers [B] to rows [B, E]."""

    def __init__(self, *, num_puzzles: int, puzzle_dim: int):
        self.table = zeros((num_puzzles, puzzle_dim), (ROWS, "embed"))

    def __call__(self, puzzles_B: jax.Array) -> jax.Array:
        """Return float32 rows; where devices hold columns each, they exchange what they look up for each other."""
        table = self.table[...]
        axes = [axis for _, axis in split_dims((ROWS, "embed"))] if in_shards() else []
        puzzles = puzzles_B
        for axis in axes:
            puzzles = jax.lax.all_gather(puzzles, axis, tiled=True)
        rows = table[puzzles]
        for axis in reversed(axes):
            rows = jax.lax.all_to_all(rows, axis, split_axis=0, concat_axis=1, tiled=True)
        return rows
