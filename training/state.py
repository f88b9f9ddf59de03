# SPDX-License-Identifier: Apache-2.0
"""The training state, which a step takes and returns."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """A plain pytree.

    Attributes:
      step: int32 scalar, steps done.
      examples: uint32 scalar, examples consumed; the next batch begins with this one.
      params: nested dictionary of float32 arrays.
      average: their exponential moving average; {} if there is none.
      optimizer: optax's state.
      carry: state of the objective, sharded like the batch; empty for language models.
      guard: memory of training/guard.py.
      noise: memory of training/noise_scale.py; {} if it does not measure.
    """

    step: jax.Array
    examples: jax.Array
    params: dict
    average: dict
    optimizer: tuple
    carry: dict
    guard: dict = dataclasses.field(default_factory=dict)
    noise: dict = dataclasses.field(default_factory=dict)

    @property
    def eval_params(self) -> dict:
        """The parameters for evaluation, sampling and export: the average if there is one."""
        return self.average or self.params
