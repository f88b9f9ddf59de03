# SPDX-License-Identifier: Apache-2.0
"""The device mesh, and the context in which models are created and run."""

import contextlib
import itertools
import math
from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

from configs.errors import ConfigError
from parallelism.axis_rules import RULES


def make_mesh(axes: dict[str, int], devices=None) -> Mesh:
    """Return a mesh of these axis sizes, in this order, over all devices or the given ones; all axes are Auto.

    `dcn_data` is the first axis; its size is 1 if it is not given. It separates TPU slices, and on other platforms
    contiguous ranges of devices. `in_space` orders the chips of a slice, so that mesh neighbours are near in the torus.
    """
    devices, axes = list(jax.devices() if devices is None else devices), {"dcn_data": 1} | axes
    if -1 not in axes.values() and math.prod(axes.values()) != len(devices):
        sizes = ", ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1) or "one device"
        raise ConfigError(f"the mesh is for {sizes}, but there are {len(devices)} devices; validate with their number")
    if devices[0].platform == "tpu":
        devices = slice_by_slice(devices, axes)
    grid = np.array(devices).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def slice_by_slice(devices: list, axes: dict[str, int]) -> list:
    """Return TPU chips ordered by slice, and within a slice by `in_space`.

    Raises ConfigError if the number of slices is not `dcn_data`.
    """
    num_slices, *sizes = axes.values()
    slices: dict[int, list] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    if len(slices) != num_slices:
        raise ConfigError(
            f"mesh.dcn_data={num_slices}, but the TPU chips are of {len(slices)} slice{'s' * (len(slices) > 1)}; set "
            f"--config.mesh.dcn_data={len(slices)}, and the other axes to a product of the chips of a slice"
        )
    chips = [slices[index] for index in sorted(slices)]
    return [part[n] for part in chips for n in in_space([tuple(chip.coords) for chip in part], sizes)]


def in_space(coordinates: list[tuple[int, int, int]], sizes: list[int]) -> list[int]:
    """Return an order of chips for a mesh of these axis sizes, in which neighbours on an axis are near each other.

    The box of chips is divided into equal boxes with as many chips as the last axis has. These boxes form a grid, which
    is divided in the same way for the axis before, and so on. `_walk` orders the cells of each box. Of all divisions,
    the one with the fewest hops between neighbours is taken; the last axis counts first. Chips that do not fill a box,
    and two cores of one chip, keep their order.
    """
    box = tuple(max(c[dim] for c in coordinates) + 1 for dim in range(3))
    if len(set(coordinates)) != len(coordinates) or math.prod(box) != len(coordinates):
        return list(range(len(coordinates)))
    sizes = [size for size in sizes if size > 1] or [1]
    parts = min(_cuts(box, sizes), key=lambda parts: list(map(_hops, parts, _steps(parts))))
    order = [(0, 0, 0)]
    for part, step in zip(parts, _steps(parts), strict=True):
        order = [tuple(np.add(np.multiply(cell, step), inner)) for cell in _walk(part) for inner in order]
    place = {c: number for number, c in enumerate(coordinates)}
    return [place[tuple(map(int, cell))] for cell in order]


def _cuts(box: tuple, sizes: list[int]) -> Iterator[list[tuple]]:
    """Yield lists of boxes, one for each size from the last to the first; their sides multiply to those of `box`."""
    if not sizes:
        yield []
        return
    for part in itertools.product(*map(_divisors, box)):
        if math.prod(part) == sizes[-1]:
            left = tuple(side // cut for side, cut in zip(box, part, strict=True))
            yield from ([part, *others] for others in _cuts(left, sizes[:-1]))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _steps(parts: list[tuple]) -> list[tuple]:
    """Return for each box the distance of neighbouring cells along each side: the product of earlier boxes' sides."""
    return list(itertools.accumulate(parts[:-1], np.multiply, initial=(1, 1, 1)))


def _hops(box: tuple, step: tuple) -> int:
    """Return the largest number of hops between consecutive cells of the walk; the first follows the last."""
    cells = np.multiply(_walk(box), step)
    return int(np.abs(cells - np.roll(cells, 1, axis=0)).sum(axis=1).max())


def _walk(box: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Return the cells of a box in an order of single hops; where possible, the last is one hop from the first.

    The walk visits the columns along z in a cycle over the plane, up one column and down the next.
    """
    heights = range(box[2])
    columns = enumerate(_cycle(box[0], box[1]))
    return [(x, y, z) for n, (x, y) in columns for z in (heights if n % 2 == 0 else reversed(heights))]


def _cycle(width: int, height: int) -> list[tuple[int, int]]:
    """Return the cells of a grid in a closed walk of single steps; open if a side is 1 or both sides are odd."""
    if width % 2 and height % 2 == 0:
        return [(x, y) for y, x in _cycle(height, width)]
    first = 1 if width % 2 == 0 and width > 1 and height > 1 else 0  # y = 0 is the way back
    up = range(first, height)
    there = [(x, y) for x in range(width) for y in (up if x % 2 == 0 else reversed(up))]
    return there + [(x, 0) for x in reversed(range(width)) if first]


@contextlib.contextmanager
def mesh_context(mesh: Mesh):
    """Set the mesh and the axis rules that layers read, for the duration of the block."""
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        yield mesh
