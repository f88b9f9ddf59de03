# SPDX-License-Identifier: Apache-2.0
"""The compiled step of each size that a batch takes, made in a thread while the steps before it run."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax


class Programs:
    """A train_step(state, batch) for batches of several sizes, each compiled once."""

    def __init__(self, compile_size: Callable[[int], Callable], rows: int, frozen: Sequence = ()):
        """Compile the step of the first size, here and now.

        Args:
          compile_size: number of rows -> compiled train_step(state, batch, *frozen).
        """
        self.compile_size, self.frozen, self.of_size = compile_size, frozen, {rows: Future()}
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self.of_size[rows].set_result(compile_size(rows))

    def begin(self, rows: int) -> None:
        """Have the step of a size compiled in the thread, unless it is already."""
        if rows not in self.of_size:
            self.of_size[rows] = self.executor.submit(self.compile_size, rows)

    def program(self, rows: int) -> Callable:
        """Return the step of a size when it is compiled."""
        self.begin(rows)
        return self.of_size[rows].result()

    def __call__(self, state, batch):
        """Make a step of the batch's size."""
        return self.program(jax.tree.leaves(batch)[0].shape[0])(state, batch, *self.frozen)
