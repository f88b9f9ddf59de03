# SPDX-License-Identifier: Apache-2.0
"""What a run carries from step to step."""

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
      average: their exponential moving average, {} where none is kept.
      optimizer: optax's state.
      carry: the objective's own, sharded like the batch; empty for language models.
      guard: what training/guard.py remembers.
      noise: what training/noise_scale.py remembers, {} where it does not measure.
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
    def evaluated(self) -> dict:
        """The parameters that are evaluated, sampled from and exported: the average where there is one."""
        return self.average or self.params
