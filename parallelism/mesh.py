# SPDX-License-Identifier: Apache-2.0
"""The device mesh, and the context in which models are made and run."""

import contextlib
import math

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

from parallelism.axis_rules import RULES


def make_mesh(axes: dict[str, int], devices=None) -> Mesh:
    """Return a mesh of these axis sizes, in this order, over all devices or the given ones; all axes are Auto.

    TPU chips stand in the order of `ring`, so that neighbours on the last axis above size 1 are neighbours in space.
    """
    devices = list(jax.devices() if devices is None else devices)
    if devices[0].platform == "tpu":
        devices = [devices[n] for n in ring([tuple(device.coords) for device in devices])]
    grid = np.array(devices).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def ring(coordinates: list[tuple[int, int, int]]) -> list[int]:
    """Return an order of chips in which each is one hop from the next, and the last from the first where that can be.

    The columns along z are visited in a cycle of the plane, up one and down the next. Chips that fill no box, and two
    cores of one chip, keep their order.
    """
    sizes = [max(c[axis] for c in coordinates) + 1 for axis in range(3)]
    if len(set(coordinates)) != len(coordinates) or math.prod(sizes) != len(coordinates):
        return list(range(len(coordinates)))
    place = {c: number for number, c in enumerate(coordinates)}
    columns = _cycle(sizes[0], sizes[1])
    heights = range(sizes[2])
    return [place[x, y, z] for n, (x, y) in enumerate(columns) for z in (heights if n % 2 == 0 else reversed(heights))]


def _cycle(width: int, height: int) -> list[tuple[int, int]]:
    """Return the cells of a grid in a closed walk of single steps; an open one where a side is 1 or both are odd."""
    if width % 2 and height % 2 == 0:
        return [(x, y) for y, x in _cycle(height, width)]
    first = 1 if width % 2 == 0 and width > 1 and height > 1 else 0  # y = 0 is the way back
    there = [
        (x, y) for x in range(width) for y in (range(first, height) if x % 2 == 0 else range(height - 1, first - 1, -1))
    ]
    return there + [(x, 0) for x in reversed(range(width)) if first]


@contextlib.contextmanager
def mesh_context(mesh: Mesh):
    """Put the mesh and the axis rules where layers look for them."""
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        yield mesh
