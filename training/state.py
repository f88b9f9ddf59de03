# SPDX-License-Identifier: Apache-2.0
"""The training state, which a step takes and returns."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """A plain pytree.

    Attributes:
      step: int32 scalar, steps done.
      examples: uint32 scalar, examples consumed; the next batch begins with this one.
      params: nested dictionary of float32 arrays.
      optimizer: optax's state.
      carry: state of the objective, sharded like the batch; empty for language models.
      extra: {name: memory} of the transforms of training/transforms/ that have one.
    """

    step: jax.Array
    examples: jax.Array
    params: dict
    optimizer: tuple
    carry: dict
    extra: dict = dataclasses.field(default_factory=dict)

    @property
    def eval_params(self) -> dict:
        """The parameters for evaluation, sampling and export: the average if there is one."""
        return self.extra.get("average") or self.params


def named_leaves(tree) -> list[tuple[str, Any]]:
    """Return (dotted path, leaf) of each array of a tree; a checkpoint has the arrays under these names."""
    return [(dotted(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def dotted(path: tuple) -> str:
    """Return a path of a tree as text, its keys joined by dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
