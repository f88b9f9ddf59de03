# SPDX-License-Identifier: Apache-2.0
"""The interface of what acts inside the jitted step, between the gradient and the new state.

A file of training/transforms/ has `make(config, weights, schedule)`, which returns a `StepTransform`, or None if the
configuration does not ask for it. The step applies them in alphabetical order of the files; those that see all changes
come last.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from configs.errors import made_by, modules_of
from layers.taps import Measure
from training.optimizers import Weights
from training.state import TrainState, dotted, named_leaves

NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float)


class StepContext(NamedTuple):
    """What the step has computed; all arrays are traced.

    Attributes:
      state: before the step.
      batch: of the step.
      gradients: the mean over the batch, with the tree of the parameters.
      gradient_norm: float32, before clipping.
      scalars: the objective's means, float32, `loss` among them.
      part_square: the mean squared norm of the gradients of the parts of the batch; None if it is not measured.
      batch_square: the squared norm of the gradient of the batch, before any transform changes it; None as above.
      num_parts: the number of these parts; 0 if it is not measured.
      measured: the means over the batch of the activations in `StepTransform.measures` of all transforms, by key. The
        mean over no token is 0.
    """

    state: TrainState
    batch: dict
    gradients: dict
    gradient_norm: jax.Array
    scalars: dict
    part_square: jax.Array | None
    batch_square: jax.Array | None
    num_parts: int
    measured: dict[str, jax.Array]


class StepChange(NamedTuple):
    """What the step is about to do: new parameters, new optimizer state, and whether they are accepted, bool.

    Any transform may reject. The guard's scalars `skipped` and `learning_rate` count only what the guard rejects.
    """

    params: dict
    optimizer: tuple
    accepted: jax.Array


class StepTransform:
    """A part of the step with a memory in `TrainState.extra[name]`.

    The memory is saved and restored with the state. An array of it that has the path of a weight is sharded like the
    weight, if each of its dimensions has the weight's size or 1. Other arrays are replicated. If the step's change is
    rejected, the memory stays as it was, unless it `remembers_rejected`. A state is not saved if a number of it is not
    finite, so begin a minimum with a large number and not with infinity.

    Attributes:
      name: of the memory and of its part in checkpoints; an identifier.
      measures_parts: whether the step must measure `StepContext.part_square`.
      remembers_rejected: whether the memory changes even if the step's change is rejected.
      sees_all_changes: whether it comes after the transforms that may change the parameters.
      measures: activations that the step measures for `StepContext.measured`, by a key, see layers/taps.py. Transforms
        that share a key must declare the same measure.
    """

    name: str
    measures: Mapping[str, Measure] = MappingProxyType({})
    measures_parts = False
    remembers_rejected = False
    sees_all_changes = False

    def init(self, params: dict) -> dict:
        """Return the initial memory; {}: there is none."""
        return {}

    def change_gradients(self, gradients: dict, state: TrainState) -> dict:
        """Return the gradients to use, mean over the batch; `state` is that before the step."""
        return gradients

    def update(self, context: StepContext, change: StepChange, memory: dict) -> tuple[StepChange, dict, dict]:
        """Return (the change of the state, the new memory, float32 scalars to report)."""
        return change, memory, {}


def measures(transforms: Sequence[StepTransform]) -> dict[str, Measure]:
    """Return the measures of all transforms by key; ValueError if a key has two meanings."""
    found: dict[str, Measure] = {}
    for transform in transforms:
        for key, measure in transform.measures.items():
            if found.setdefault(key, measure) != measure:
                raise ValueError(
                    f"step transform {transform.name}: measures[{key!r}] differs from another transform's; rename it"
                )
    return found


def check(transforms: Sequence[StepTransform]) -> None:
    """Raise ValueError if the names of transforms are not identifiers, or not different.

    A name must differ from the other parts of the state, since a checkpoint has all of them side by side.
    """
    fields = [field.name for field in dataclasses.fields(TrainState)]
    uses = Counter([*fields, *(transform.name for transform in transforms)])
    for transform in transforms:
        if not transform.name.isidentifier() or uses[transform.name] > 1:
            raise ValueError(
                f"step transform {type(transform).__name__}: name={transform.name!r} must be an identifier, and differ "
                f"from those of other transforms and from {', '.join(fields)}"
            )


def changed_gradients(transform: StepTransform, gradients: dict, state: TrainState) -> dict:
    """Return the gradients that a transform returns; TypeError if their names, shapes or types have changed."""
    changed = transform.change_gradients(gradients, state)
    check_like(f"change_gradients of step transform {transform.name} returned", changed, gradients)
    return changed


def updated(
    transform: StepTransform, context: StepContext, change: StepChange, memory: dict
) -> tuple[StepChange, dict, dict]:
    """Return what `update` of a transform returns; TypeError if it is not what the interface says."""
    what = f"update of step transform {transform.name} returned"
    match transform.update(context, change, memory):
        case (StepChange() as changed, dict() as remembered, dict() as scalars):
            check_like(f"{what} a StepChange", changed, change)
            check_like(f"{what} a memory unlike that of init", remembered, memory)
        case other:
            kinds = type(other).__name__
            if kinds == "tuple":
                kinds = ", ".join(type(part).__name__ for part in other)
            raise TypeError(f"{what} {kinds}; it must return a StepChange, the memory and a dictionary of scalars")
    for name, scalar in scalars.items():
        if not isinstance(scalar, NUMBERS) or jnp.ndim(scalar):
            found = f"an array {list(jnp.shape(scalar))}" if isinstance(scalar, NUMBERS) else type(scalar).__name__
            raise TypeError(f"{what} the scalar {name!r} as {found}; it must be a number")
    return changed, remembered, scalars


def checked_direction(name: str, direction: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return the same optimizer, which raises TypeError with its `name` if an update changes shapes or types.

    Updates must have the shapes of the gradients, and the new state must be like the old one, see `check_like`.
    """
    inner = optax.with_extra_args_support(direction)

    def update(gradients, state, params=None, **extra):
        updates, after = inner.update(gradients, state, params, **extra)
        if jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, gradients):
            raise TypeError(f"{name} returned updates of other shapes than the gradients")
        check_like(f"{name} returned a state", after, state)
        return updates, after

    return optax.GradientTransformationExtraArgs(inner.init, update)


def check_like(what: str, tree: object, wanted: object) -> None:
    """Raise TypeError unless a tree has the names and shapes of another one, and no wider types; `what` begins it."""
    found, expected = (dict(jax.tree_util.tree_flatten_with_path(one)[0]) for one in (tree, wanted))
    for path in {**expected, **found}:
        new, old = found.get(path), expected.get(path)
        if not fits(new, old):
            name = dotted(path) or "it"
            raise TypeError(f"{what}: {name} is {type_text(new)}, where {type_text(old)} is expected")
    if (found := jax.tree.structure(tree)) != (expected := jax.tree.structure(wanted)):
        raise TypeError(f"{what}: its containers are {found}, where {expected} is expected")


def fits(new: object, old: object) -> bool:
    """Return whether a number or array has the shape of another one, and a type that the other's can hold."""
    if not (isinstance(new, NUMBERS) and isinstance(old, NUMBERS)) or jnp.shape(new) != jnp.shape(old):
        return False
    return jnp.result_type(new, old) == jnp.result_type(old)


def type_text(leaf: object) -> str:
    """Return the type of a number or array, with its shape, or the name of another type."""
    if leaf is None:
        return "nothing"
    return str(jax.typeof(leaf)) if isinstance(leaf, NUMBERS) else type(leaf).__name__


def check_storable(part: str, state: object) -> None:
    """Raise ValueError for an array, given by shape and type, that no checkpoint can hold; `part` names the state."""
    leaves = named_leaves(state)
    uses = Counter(path for path, _ in leaves)
    for path, leaf in leaves:
        problems = {
            "has a slash in its name": "/" in path,
            "has the same name as another one, with dots for levels": uses[path] > 1,
            "has no elements": leaf.size == 0,
            "is a random key; keep jax.random.key_data of it": jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key),
        }
        for problem in (problem for problem, is_there in problems.items() if is_there):
            raise ValueError(f"{part}: {path} {problem}; a checkpoint cannot hold it")


def of_config(config, weights: Weights, schedule: optax.Schedule) -> tuple[StepTransform, ...]:
    return tuple(made_by(modules_of("training.transforms"), StepTransform, config, weights, schedule))


def ordered(transforms: Iterable[StepTransform]) -> tuple[StepTransform, ...]:
    """Return the transforms in their order; those that see all changes come last."""
    return tuple(sorted(transforms, key=lambda transform: transform.sees_all_changes))
