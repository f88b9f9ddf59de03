# SPDX-License-Identifier: Apache-2.0
"""Where each tensor of Hugging Face's stands in our arrays, and how blocks of the one become blocks of the other."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict

from configs.base import ConfigError
from migration import hugging_face_families as families

BLOCK_BYTES = 1 << 26  # of float32 rows in memory at once


class Tensor(NamedTuple):
    """A tensor of theirs, and where it stands in ours.

    Attributes:
        shape: of theirs.
        ours: dotted name of the array.
        index: in the leading dims of ours.
        inner: shape of ours after these.
        inputs: as of a Rule.
        factor: ours times this is theirs.
    """

    name: str
    shape: tuple[int, ...]
    ours: str
    index: tuple[int, ...]
    inner: tuple[int, ...]
    inputs: int | None
    factor: float = 1.0

    @property
    def split(self) -> int:
        """The dim of `inner` along which blocks are taken."""
        return self.inputs or 0

    @property
    def step(self) -> int:
        """How much of that dim is a block."""
        return max(1, min(self.inner[self.split], BLOCK_BYTES * self.inner[self.split] // (4 * math.prod(self.inner))))

    def blocks(self) -> Iterator[tuple[tuple, int, int]]:
        """Yield (where a block is in ours, its first row in theirs, the row after its last)."""
        size, dim = self.inner[self.split], self.split
        rows = self.shape[0] // size
        for start in range(0, size, self.step):
            stop = min(size, start + self.step)
            yield (*self.index, *(slice(None),) * dim, slice(start, stop)), start * rows, stop * rows

    def from_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return float32 of ours of rows of theirs."""
        shape = [*self.inner[: self.split], -1, *self.inner[self.split + 1 :]]
        return (rows.T if self.inputs else rows).astype(np.float32).reshape(shape)

    def to_rows(self, block: np.ndarray) -> np.ndarray:
        """Return rows of theirs of a block of ours."""
        if self.inputs:
            return block.reshape(self.shape[1], -1).T
        return block.reshape(-1, *self.shape[1:])


def tensors_of(family: families.Family, params: dict) -> list[Tensor]:
    """Return all tensors of theirs that a model has, those of one array of ours one after the other.

    Args:
      params: tree of anything with a shape.
    """
    shapes, found = {name: leaf.shape for name, leaf in flatten_dict(params, sep=".").items()}, []
    for rule in (*families.RULES, *family.rules):
        if rule.ours in shapes:
            shape = shapes.pop(rule.ours)
            stacked = rule.theirs.count("{}")
            inner = shape[stacked:]
            theirs = _their_shape(inner, rule.inputs)
            found += [
                Tensor(rule.theirs.format(*index), theirs, rule.ours, index, inner, rule.inputs)
                for index in np.ndindex(shape[:stacked])
            ]
    if unnamed := shapes.keys() - set(family.zeros):
        raise ConfigError(f"{min(unnamed)} has no name in {family.architecture}; export a model of that family")
    return found


def _their_shape(inner: tuple, inputs: int | None) -> tuple:
    if inputs is None:
        return inner
    out = math.prod(inner[inputs:])
    return (out, math.prod(inner[:inputs])) if inputs else (out,)


def folded(model: dict, tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors of a model whose embedding is not scaled and whose head is apart and not scaled either."""
    width = model["embed_dim"]
    embed = next(tensor for tensor in tensors if tensor.ours == "embed.embedding")
    head = next((tensor for tensor in tensors if tensor.ours == "head.kernel"), embed._replace(name="lm_head.weight"))
    head_scale = (model["mup_base_dim"] / width) ** 0.5 if model["mup_base_dim"] else 1.0
    others = [tensor for tensor in tensors if tensor not in (embed, head)]
    embed = embed._replace(factor=model["embed_scale"] or width**0.5)
    return [embed, *others, head._replace(factor=head_scale)]
