# SPDX-License-Identifier: Apache-2.0
"""The interface of what acts inside the jitted step, between the gradient and the new state.

A file of training/transforms/ has `make(config, weights, schedule)`, which returns a `StepTransform`, or None if the
configuration does not ask for it. The step applies them in alphabetical order of the files.
"""

import importlib
import pathlib
from typing import NamedTuple

import jax
import optax

from training.optimizers import Weights
from training.state import TrainState

FOLDER = pathlib.Path(__file__).parent / "transforms"


class StepContext(NamedTuple):
    """What the step has computed; all arrays are traced.

    Attributes:
      state: before the step.
      batch: of the step.
      gradients: the mean over the batch, with the tree of the parameters.
      gradient_norm: float32, before clipping.
      scalars: the objective's means, float32, `loss` among them.
      part_square: the mean squared norm of the gradients of the parts of the batch; None if it is not measured.
      num_parts: the number of these parts; 0 if it is not measured.
    """

    state: TrainState
    batch: dict
    gradients: dict
    gradient_norm: jax.Array
    scalars: dict
    part_square: jax.Array | None
    num_parts: int


class StepChange(NamedTuple):
    """What the step is about to do: new parameters, new optimizer state, and whether they are accepted, bool."""

    params: dict
    optimizer: tuple
    accepted: jax.Array


class StepTransform:
    """A part of the step with a memory in `TrainState.extra[name]`.

    The memory is saved and restored with the state. An array of it that has the path of a weight is sharded like the
    weight, if each of its dimensions has the weight's size or 1. Other arrays are replicated. If the step's change is
    rejected, the memory stays as it was.

    Attributes:
      name: of the memory.
      measures_parts: whether the step must measure `StepContext.part_square`.
      remembers_rejected: whether the memory changes even if the step's change is rejected.
    """

    name: str
    measures_parts = False
    remembers_rejected = False

    def init(self, params: dict) -> dict:
        """Return the initial memory; {}: there is none."""
        return {}

    def change_gradients(self, gradients: dict) -> dict:
        """Return the gradients to use, mean over the batch."""
        return gradients

    def update(self, context: StepContext, change: StepChange, memory: dict) -> tuple[StepChange, dict, dict]:
        """Return (the change of the state, the new memory, float32 scalars to report)."""
        return change, memory, {}


def of_config(config, weights: Weights, schedule: optax.Schedule) -> tuple[StepTransform, ...]:
    """Return the transforms that a configuration asks for."""
    modules = (importlib.import_module(f"training.transforms.{path.stem}") for path in sorted(FOLDER.glob("*.py")))
    made = (module.make(config, weights, schedule) for module in modules)
    return tuple(transform for transform in made if transform)
