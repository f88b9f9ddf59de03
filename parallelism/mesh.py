# SPDX-License-Identifier: Apache-2.0
"""The device mesh, and the context in which models are made and run."""

import contextlib
import math

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

from configs.base import ConfigError
from parallelism.axis_rules import RULES


def make_mesh(axes: dict[str, int], devices=None) -> Mesh:
    """Return a mesh of these axis sizes, in this order, over all devices or the given ones; all axes are Auto.

    `dcn_data` is the first axis, of size 1 where it is not given: slices of TPU chips, elsewhere contiguous parts. The
    chips of a slice stand in the order of `ring`, so that neighbours on the last axis above size 1 are neighbours in
    space.

    Raises:
      ConfigError: there are not `dcn_data` slices.
    """
    devices, axes = list(jax.devices() if devices is None else devices), {"dcn_data": 1} | axes
    if devices[0].platform == "tpu":
        devices = slice_by_slice(devices, axes["dcn_data"])
    grid = np.array(devices).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def slice_by_slice(devices: list, num_slices: int) -> list:
    """Return TPU chips in the order of their slices, those of a slice in the order of its `ring`."""
    slices: dict[int, list] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    if len(slices) != num_slices:
        there = "1 slice" if len(slices) == 1 else f"{len(slices)} slices"
        raise ConfigError(
            f"mesh.dcn_data={num_slices}, but the TPU chips are of {there}; set mesh.dcn_data={len(slices)}, "
            "and the other axes to a product of the chips of a slice"
        )
    chips = [slices[index] for index in sorted(slices)]
    return [part[n] for part in chips for n in ring([tuple(chip.coords) for chip in part])]


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
