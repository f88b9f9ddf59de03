# SPDX-License-Identifier: Apache-2.0
"""Maps each Hugging Face tensor ("theirs") to its place in our arrays, and converts blocks in both directions."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict

from configs.errors import ConfigError
from migration import hugging_face_families as families

BLOCK_BYTES = 1 << 26  # of float32 rows in memory at once


class Tensor(NamedTuple):
    """A Hugging Face tensor and its place in our array.

    Attributes:
        shape: of their tensor.
        ours: dotted name of our array.
        index: in the leading dims of our array.
        inner: shape of our array after these dims.
        inputs: as in Rule.
        factor: theirs = ours * factor.
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
        """The dim of `inner` that is split into blocks."""
        return self.inputs or 0

    @property
    def step(self) -> int:
        """The size of a block along that dim."""
        return max(1, min(self.inner[self.split], BLOCK_BYTES * self.inner[self.split] // (4 * math.prod(self.inner))))

    def blocks(self) -> Iterator[tuple[tuple, int, int]]:
        """Yield (index of a block in our array, its first row in their tensor, the row after its last)."""
        size, dim = self.inner[self.split], self.split
        rows = self.shape[0] // size
        for start in range(0, size, self.step):
            stop = min(size, start + self.step)
            yield (*self.index, *(slice(None),) * dim, slice(start, stop)), start * rows, stop * rows

    def from_rows(self, rows: np.ndarray) -> np.ndarray:
        """Convert rows of their tensor to a float32 block of our array."""
        shape = [*self.inner[: self.split], -1, *self.inner[self.split + 1 :]]
        return (rows.T if self.inputs else rows).astype(np.float32).reshape(shape)

    def to_rows(self, block: np.ndarray) -> np.ndarray:
        """Convert a block of our array to rows of their tensor."""
        if self.inputs:
            return block.reshape(self.shape[1], -1).T
        return block.reshape(-1, *self.shape[1:])


def tensors_of(family: families.Family, params: dict) -> list[Tensor]:
    """Return all their tensors of a model; tensors of one of our arrays are consecutive.

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
    """Return tensors for a format with an unscaled embedding and a separate, unscaled head; scales become factors."""
    width = model["embed_dim"]
    embed = next(tensor for tensor in tensors if tensor.ours == "embed.embedding")
    head = next((tensor for tensor in tensors if tensor.ours == "head.kernel"), embed._replace(name="lm_head.weight"))
    head_scale = (model["mup_base_dim"] / width) ** 0.5 if model["mup_base_dim"] else 1.0
    others = [tensor for tensor in tensors if tensor not in (embed, head)]
    embed = embed._replace(factor=model["embed_scale"] or width**0.5)
    return [embed, *others, head._replace(factor=head_scale)]
