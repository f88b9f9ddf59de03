# SPDX-License-Identifier: Apache-2.0
"""The steps of a run, for a caller's own loop; see docs/python.md."""

import dataclasses

import jax

from configs.errors import ConfigError
from core.assembly import Run
from parallelism.mesh import mesh_context
from parallelism.placement import check_batch, check_ids
from settings import cycles
from training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Steps:
    """steps(state, batch) -> (state, scalars) of `run`; the input state is donated.

    The learning rate of the configuration follows train.steps; `train.tokens` and `train.epochs` are not read. Raises
    ConfigError for a run that needs the weights of another one, or whose batch, mesh or cycles change.
    """

    run: Run

    def __post_init__(self):
        of_others = [f"{role} model" for role in self.run.abstract_frozen]
        if self.run.config.train.init_from or of_others:
            what = " and ".join(of_others) or "train.init_from"
            raise ConfigError(f"Steps begins with random weights and has no {what}, which train.train reads; call that")
        config = self.run.config
        for key in cycles.changing_keys(config):
            raise ConfigError(f"Steps takes every step in one way, and {key} is read by train.train; leave it out")

    def init(self):
        """Return the first state, on the devices of the run."""
        with mesh_context(self.run.mesh):
            return self.run.init()

    def __call__(self, state, batch: dict) -> tuple:
        """Take one step on int32 [global_batch, length] arrays: tokens, targets, segments and positions.

        Ids on a device are not read back, and so are not checked.

        Args:
          state: the TrainState that `init` or the last step returned.

        Raises:
          ValueError: another batch, or a state that an earlier step was given.
          TypeError: `state` is not a TrainState.
        """
        check_batch(batch, self.run.abstract_batch, "the batch given to Steps")
        if "segments" in batch and not any(isinstance(array, jax.Array) for array in batch.values()):
            check_ids(batch, self.run.config.model.vocab_size, "the batch given to Steps")
        _check_state(state)
        batch = {name: jax.device_put(array, self.run.abstract_batch[name].sharding) for name, array in batch.items()}
        with mesh_context(self.run.mesh):
            return self.run.train_step(state, batch)


def _check_state(state) -> None:
    """Raise ValueError for a state whose arrays are deleted, with which jax would end the process."""
    if not isinstance(state, TrainState):
        raise TypeError(f"the state given to Steps is a {type(state).__name__}; give the one that init() returned")
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        raise ValueError(
            "the state given to Steps is deleted, since a step deletes the state that it is given; go on with the one "
            "that it returned, or begin with init()"
        )
