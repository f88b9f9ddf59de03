# SPDX-License-Identifier: Apache-2.0
"""Compiled train steps, one for each Shape; later ones compile in a thread while earlier ones run."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax

from configs.base import MESH_AXES


class Shape(NamedTuple):
    """The key of a compiled step: rows of the global batch, and the sizes of MESH_AXES.

    Attributes:
      cycles: of a recursive model whose cycles grow: high and low.
    """

    rows: int
    mesh: tuple[int, ...]
    cycles: tuple[int, int] | None = None


class CompiledSteps:
    """A train_step(state, batch) for batches of several shapes; each shape is compiled once."""

    def __init__(self, compile_step: Callable[[Shape], Callable], shape: Shape, frozen: dict):
        """Compile the step of the first shape now; `compile_step` returns train_step(state, batch, frozen).

        `frozen` is on the mesh of the present steps. Code that reshards the state must reshard `frozen` too. A batch
        does not say `cycles`, so that code that begins a stage sets them.
        """
        self.compile_step, self.frozen, self.by_shape = compile_step, frozen, {shape: Future()}
        self.cycles = shape.cycles
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self.by_shape[shape].set_result(compile_step(shape))

    def start(self, shape: Shape) -> None:
        """Start to compile the step of a shape in the thread, unless this was done."""
        if shape not in self.by_shape:
            self.by_shape[shape] = self.executor.submit(self.compile_step, shape)

    def get(self, shape: Shape) -> Callable:
        """Return the step of a shape; wait until it is compiled."""
        self.start(shape)
        return self.by_shape[shape].result()

    def close(self) -> None:
        """Free the frozen weights and the programs, and end the thread; a run's cycle of references would keep them."""
        self.executor.shutdown(wait=False, cancel_futures=True)
        self.frozen, self.by_shape = {}, {}

    def __call__(self, state, batch):
        return self.get(shape_of(batch, self.cycles))(state, batch, self.frozen)


def shape_of(batch: dict, cycles: tuple[int, int] | None) -> Shape:
    """Return the shape of a step with these cycles for a batch on its devices."""
    array = jax.tree.leaves(batch)[0]
    return Shape(array.shape[0], tuple(array.sharding.mesh.shape[axis] for axis in MESH_AXES), cycles)
