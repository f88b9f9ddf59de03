# SPDX-License-Identifier: Apache-2.0
"""The device mesh, and the context in which models are made and run."""

import contextlib

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh

from parallelism.axis_rules import RULES


def make_mesh(axes: dict[str, int], devices=None) -> Mesh:
    """Return a mesh of these axis sizes, in this order, over all devices or the given ones; all axes are Auto."""
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=devices)


@contextlib.contextmanager
def mesh_context(mesh: Mesh):
    """Put the mesh and the axis rules where layers look for them."""
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        yield mesh
