# SPDX-License-Identifier: Apache-2.0
"""The steps of a run, for a caller's own loop; see docs/python.md."""

import dataclasses

import jax

from core.assembly import Run
from parallelism.mesh import mesh_context


@dataclasses.dataclass(frozen=True)
class Steps:
    """steps(state, batch) -> (state, scalars) of `run`; the input state is donated."""

    run: Run

    def init(self):
        """Return the first state, on the devices of the run."""
        with mesh_context(self.run.mesh):
            return self.run.init()

    def __call__(self, state, batch: dict) -> tuple:
        """Take one step on int32 [global_batch, length] arrays: tokens, targets, segments and positions."""
        batch = {name: jax.device_put(array, self.run.abstract_batch[name].sharding) for name, array in batch.items()}
        with mesh_context(self.run.mesh):
            return self.run.train_step(state, batch)
