# SPDX-License-Identifier: Apache-2.0
"""Chips stand in the mesh so that a ring over them is one of single hops."""

import itertools

import jax
import numpy as np
import pytest

from parallelism.mesh import make_mesh, ring


def hops(first, second) -> int:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "box", [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (2, 4, 1), (4, 4, 1), (3, 4, 2)]
)
def test_chips_of_a_slice_are_a_closed_ring_of_single_hops(box):
    """The slices of configs/topologies.py, however the runtime lists their chips."""
    chips = list(itertools.product(*map(range, box)))
    np.random.default_rng(0).shuffle(chips)
    chips = [tuple(map(int, chip)) for chip in chips]
    order = [chips[n] for n in ring(chips)]
    assert sorted(order) == sorted(chips)
    assert {hops(a, b) for a, b in zip(order, order[1:] + order[:1], strict=True)} == {1}


@pytest.mark.parametrize("box", [(1, 1, 1), (2, 1, 1), (1, 1, 4), (3, 3, 1), (1, 5, 1)])
def test_other_boxes_are_a_walk_of_single_hops(box):
    chips = list(itertools.product(*map(range, box)))
    order = [chips[n] for n in ring(chips)]
    assert sorted(order) == chips
    assert {hops(a, b) for a, b in itertools.pairwise(order)} <= {1}


@pytest.mark.parametrize("chips", [[(0, 0, 0), (0, 0, 0)], [(0, 0, 0), (1, 1, 0), (0, 1, 0)]])
def test_cores_of_one_chip_and_parts_of_a_slice_keep_their_order(chips):
    assert ring(chips) == list(range(len(chips)))


def test_devices_without_coordinates_keep_their_order():
    mesh = make_mesh({"data": 2, "fsdp": 4})
    assert mesh.devices.tolist() == np.array(jax.devices()).reshape(2, 4).tolist()
    assert mesh.axis_names == ("data", "fsdp")
