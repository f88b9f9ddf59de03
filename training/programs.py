# SPDX-License-Identifier: Apache-2.0
"""The compiled step of each size of the batch and each mesh, made in a thread while the steps before it run."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax

from configs.base import MESH_AXES


class Shape(NamedTuple):
    """What a step is compiled for: rows of the global batch, and the sizes of MESH_AXES."""

    rows: int
    mesh: tuple[int, ...]


class Programs:
    """A train_step(state, batch) for batches of several shapes, each compiled once."""

    def __init__(self, compile_step: Callable[[Shape], Callable], shape: Shape, frozen: Sequence = ()):
        """Compile the step of the first shape, here and now; `compile_step` returns train_step(state, batch, *frozen).

        `frozen` is on the mesh of the steps that are made; who moves a state to another moves it too.
        """
        self.compile_step, self.frozen, self.of_shape = compile_step, frozen, {shape: Future()}
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self.of_shape[shape].set_result(compile_step(shape))

    def begin(self, shape: Shape) -> None:
        """Have the step of a shape compiled in the thread, unless it is already."""
        if shape not in self.of_shape:
            self.of_shape[shape] = self.executor.submit(self.compile_step, shape)

    def program(self, shape: Shape) -> Callable:
        """Return the step of a shape when it is compiled."""
        self.begin(shape)
        return self.of_shape[shape].result()

    def __call__(self, state, batch):
        """Make a step of the batch's shape."""
        return self.program(shape_of(batch))(state, batch, *self.frozen)


def shape_of(batch: dict) -> Shape:
    """Return the shape of a batch on its devices."""
    array = jax.tree.leaves(batch)[0]
    return Shape(array.shape[0], tuple(array.sharding.mesh.shape[axis] for axis in MESH_AXES))
