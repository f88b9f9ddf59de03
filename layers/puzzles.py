# SPDX-License-Identifier: Apache-2.0
"""An embedding table with one row for each puzzle. A batch uses few rows. B puzzles, E width of a row.

The rows start as zeros and have their own optimizer, see training/optimizers.py.
"""

import jax
from flax import nnx

from layers.axes import inside_shard_map, zeros
from layers.embeddings import look_up
from layers.fsdp import sharded_dims

ROWS = "puzzles"  # names the dimension of a table's rows


class PuzzleTable(nnx.Module):
    """Map identifiers [B] to rows [B, E]."""

    def __init__(self, *, num_puzzles: int, puzzle_dim: int):
        self.table = zeros((num_puzzles, puzzle_dim), (ROWS, "embed"))

    def __call__(self, puzzles_B: jax.Array) -> jax.Array:
        """Return float32 rows. If columns are sharded, each device looks up its columns for all, then all-to-all."""
        table = self.table[...]
        axes = [axis for _, axis in sharded_dims((ROWS, "embed"))] if inside_shard_map() else []
        puzzles = puzzles_B
        for axis in axes:
            puzzles = jax.lax.all_gather(puzzles, axis, tiled=True)
        rows = look_up(table, puzzles)
        for axis in reversed(axes):
            rows = jax.lax.all_to_all(rows, axis, split_axis=0, concat_axis=1, tiled=True)
        return rows
