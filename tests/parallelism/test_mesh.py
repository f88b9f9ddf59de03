# SPDX-License-Identifier: Apache-2.0
"""Chips are ordered in the mesh so that neighbours in a ring are one hop apart."""

import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from configs.errors import ConfigError
from parallelism.mesh import in_space, make_mesh, slice_by_slice


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
    order = [chips[n] for n in in_space(chips, [len(chips)])]
    assert sorted(order) == sorted(chips)
    assert {hops(a, b) for a, b in zip(order, order[1:] + order[:1], strict=True)} == {1}


@pytest.mark.parametrize("box", [(1, 1, 1), (2, 1, 1), (1, 1, 4), (3, 3, 1), (1, 5, 1)])
def test_other_boxes_are_a_walk_of_single_hops(box):
    chips = list(itertools.product(*map(range, box)))
    order = [chips[n] for n in in_space(chips, [len(chips)])]
    assert sorted(order) == chips
    assert {hops(a, b) for a, b in itertools.pairwise(order)} <= {1}


@pytest.mark.parametrize(
    ("box", "sizes", "hops_of_axes"),
    [
        ((2, 4, 4), (4, 2, 4), [2, 1, 1]),
        ((2, 4, 4), (4, 4, 2), [2, 1, 1]),
        ((2, 2, 4), (2, 1, 8), [1, 0, 1]),
        ((4, 4, 4), (4, 4, 4), [2, 2, 1]),
        ((2, 4, 4), (8, 4), [2, 1]),
        ((2, 2, 1), (2, 2), [1, 1]),
    ],
)
def test_neighbours_on_every_axis_are_near_the_last_axes_the_nearest(box, sizes, hops_of_axes):
    chips = list(itertools.product(*map(range, box)))
    grid = np.array([chips[n] for n in in_space(chips, sizes)]).reshape(*sizes, 3)
    assert sorted(map(tuple, grid.reshape(-1, 3).tolist())) == chips
    far = [np.abs(np.roll(grid, 1, axis) - grid).sum(axis=-1).max() for axis in range(len(sizes))]
    assert far == hops_of_axes


@pytest.mark.parametrize("chips", [[(0, 0, 0), (0, 0, 0)], [(0, 0, 0), (1, 1, 0), (0, 1, 0)]])
def test_cores_of_one_chip_and_parts_of_a_slice_keep_their_order(chips):
    assert in_space(chips, [len(chips)]) == list(range(len(chips)))


def test_devices_without_coordinates_keep_their_order():
    mesh = make_mesh({"data": 2, "fsdp": 4})
    assert mesh.devices.tolist() == np.array(jax.devices()).reshape(1, 2, 4).tolist()
    assert mesh.axis_names == ("dcn_data", "data", "fsdp")


def test_slices_of_devices_without_coordinates_are_contiguous_and_slowest():
    mesh = make_mesh({"model": 2, "fsdp": 2, "dcn_data": 2})
    assert mesh.axis_names == ("dcn_data", "model", "fsdp")
    assert [[device.id for device in part.flat] for part in mesh.devices] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def chips_of(num_slices: int, box=(2, 2, 2)) -> list:
    """Return stand-ins for the TPU chips of some slices, in any order."""
    places = list(itertools.product(*map(range, box)))
    chips = [
        SimpleNamespace(platform="tpu", slice_index=n, coords=place) for n in range(num_slices) for place in places
    ]
    np.random.default_rng(0).shuffle(chips)
    return chips


def test_slices_stand_in_order_and_each_is_a_ring():
    parts = np.array(slice_by_slice(chips_of(3), {"dcn_data": 3, "fsdp": 8})).reshape(3, 8)
    for number, part in enumerate(parts):
        assert {chip.slice_index for chip in part} == {number}
        assert {hops(a.coords, b.coords) for a, b in zip(part, np.roll(part, -1), strict=True)} == {1}


def test_chips_that_know_of_no_slices_are_one():
    chips = [SimpleNamespace(platform="tpu", coords=(x, 0, 0)) for x in (1, 0)]
    assert [chip.coords[0] for chip in slice_by_slice(chips, {"dcn_data": 1, "fsdp": 2})] == [0, 1]


@pytest.mark.parametrize(
    ("there", "dcn_data", "words"),
    [
        (2, 1, r"mesh.dcn_data=1, but the TPU chips are of 2 slices; set --config.mesh.dcn_data=2"),
        (1, 2, r"mesh.dcn_data=2, but the TPU chips are of 1 slice; set --config.mesh.dcn_data=1"),
    ],
)
def test_another_number_of_slices_than_the_mesh_says_is_an_error(there, dcn_data, words):
    with pytest.raises(ConfigError, match=words):
        make_mesh({"dcn_data": dcn_data, "fsdp": 8 * there // dcn_data}, chips_of(there))
