# SPDX-License-Identifier: Apache-2.0
"""Choose hidden units that are of little use, and replace them.

Arrays of units are [..., F], one group of F units for each layer (and expert). U is short for [..., F]. K is the most
units of a group that one step replaces. The memory of a transform has an array of units at the path of their outgoing
weight, with size 1 in the dimension that is not the units, so that it is sharded as the weight is.
"""

import zlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from layers.units import Path, Units
from training.optimizers import reset_moments
from training.step_transform import StepChange

STREAM = 0x756E6974  # of random numbers, apart from those of the loss


def shape_of(units: Units, params: dict) -> tuple[int, ...]:
    path, side = units.outgoing
    shape = flatten_dict(params)[path].shape
    return (*shape[:side], *shape[side + 1 :])


def to_memory(arrays: Sequence[jax.Array], all_units: Sequence[Units]) -> dict:
    """Return a nested dictionary of arrays of units, one for each of `all_units`."""
    places = [units.outgoing for units in all_units]
    return unflatten_dict({path: jnp.expand_dims(x, side) for x, (path, side) in zip(arrays, places, strict=True)})


def filled(all_units: Sequence[Units], params: dict, value: float) -> dict:
    """Return a memory with an array of each of the units, filled with a number."""
    return to_memory([jnp.full(shape_of(units, params), value, type(value)) for units in all_units], all_units)


def from_memory(memory: dict, units: Units) -> jax.Array:
    path, side = units.outgoing
    return jnp.squeeze(flatten_dict(memory)[path], side)


def of_units(measured: jax.Array, units: Units) -> jax.Array:
    """Return what is measured at the tap of these units."""
    return measured if units.layer is None else measured[units.layer]


def mean_sizes(params: dict, units: Units) -> tuple[jax.Array, jax.Array]:
    """Return the mean absolute value of the incoming weights and of the outgoing weights of each unit, both U."""
    flat, (path, side) = flatten_dict(params), units.outgoing
    incoming = [jnp.abs(flat[weight]).mean(axis=dim) for weight, dim in units.incoming.items()]
    return sum(incoming) / len(incoming), jnp.abs(flat[path]).mean(axis=side)


def lowest(scores_U: jax.Array, number: jax.Array, most: int) -> jax.Array:
    """Return bool [..., K, F]: which unit is the k-th of the `number` units of each group with the lowest scores.

    `number` is int [..., 1], and at most `most`, which is K.
    """
    _, chosen = jax.lax.top_k(-scores_U, most)
    is_kth = chosen[..., None] == jnp.arange(scores_U.shape[-1])
    return is_kth & (jnp.arange(most) < number)[..., None]


def dormant(activity_U: jax.Array, threshold: float) -> jax.Array:
    """Return whether each unit's mean absolute activation is at most `threshold` times the mean of its group.

    This is the definition of ReDo (arXiv:2302.12902, definition 3.1).
    """
    return activity_U <= threshold * activity_U.mean(axis=-1, keepdims=True)


class Surgeon:
    """Replaces units in a step's change.

    Attributes:
      masks: {path: bool of the shape of the weight}: the entries that were replaced.

    Args:
      change: of the step.
      stddevs: of the initial distributions of all weights.
      key: of all draws.
    """

    def __init__(self, change: StepChange, stddevs: Mapping[Path, float], key: jax.Array):
        self.change, self.params, self.masks = change, flatten_dict(change.params), {}
        self.stddevs, self.key = stddevs, key

    def replace(
        self, units: Units, mask_U: jax.Array, *, is_kth: jax.Array | None = None, mean_U: jax.Array | None = None,
        redraws_outgoing: bool = False,
    ) -> None:  # fmt: skip
        """Replace units: draw incoming weights from their initial distribution, and zero the biases of the units.

        Args:
          mask_U: bool, which units.
          is_kth: bool [..., K, F], see `lowest`: the same units, if they are few; else draws are made for all units.
          mean_U: their mean activation, whose product with the outgoing weights is added to the next bias, if there is
            one; None: nothing is added.
          redraws_outgoing: draw outgoing weights from their initial distribution; false: they become zero.
        """
        outgoing, side = units.outgoing
        for path, dim in units.incoming.items():
            self._set(path, jnp.expand_dims(mask_U, dim), self._drawn(path, dim, is_kth))
        for path in units.biases:
            self._set(path, mask_U, 0.0)
        if mean_U is not None and units.next_bias:
            lost = jnp.where(mask_U, mean_U, 0.0)
            contribution = jnp.expand_dims(lost, side) * self.params[outgoing]
            of_units = mask_U.ndim if side < mask_U.ndim else mask_U.ndim - 1
            self.params[units.next_bias] += contribution.sum(axis=of_units)
        fresh = self._drawn(outgoing, side, is_kth) if redraws_outgoing else 0.0
        self._set(outgoing, jnp.expand_dims(mask_U, side), fresh)

    def result(self) -> StepChange:
        """Return the change with the replaced units, whose moments are zero."""
        optimizer = reset_moments(self.change.optimizer, self.masks)
        return self.change._replace(params=unflatten_dict(self.params), optimizer=optimizer)

    def _set(self, path: Path, mask: jax.Array, value: jax.Array | float) -> None:
        weight = self.params[path]
        self.params[path] = jnp.where(mask, value, weight)
        self.masks[path] = jnp.broadcast_to(mask, weight.shape) | self.masks.get(path, False)

    def _drawn(self, path: Path, side: int, is_kth: jax.Array | None) -> jax.Array:
        """Return new weights of all units, or of those of `is_kth` and zeros, by a draw for K units of each group."""
        key, shape = jax.random.fold_in(self.key, zlib.crc32(".".join(path).encode())), self.params[path].shape
        if is_kth is None:
            return self.stddevs[path] * jax.random.normal(key, shape)
        shape = [size for dim, size in enumerate(shape) if dim != side] + [shape[side]]
        shape[-2] = is_kth.shape[-2]
        draws = self.stddevs[path] * jax.random.normal(key, shape)
        # At the highest precision a TPU does not round the draws to bfloat16.
        fresh = jnp.einsum("...kf,...kd->...fd", is_kth.astype(draws.dtype), draws, precision=jax.lax.Precision.HIGHEST)
        return jnp.moveaxis(fresh, -1, side)


def key_of_step(seed: int, step: jax.Array) -> jax.Array:
    """Return the random key of a step, so that a resumed run draws the same."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), STREAM), step)
