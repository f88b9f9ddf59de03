# SPDX-License-Identifier: Apache-2.0
"""The gradient where a mesh splits batch, weights and heads alone: each device computes that of its own part.

One `jax.shard_map` over the whole mesh, in which layers bring their weights whole as they open (layers/shards.py), and
the stream (layers/stream.py). The compiler, left to place everything itself, waits for each sum over devices; so it
sums while it computes.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from layers.axes import several
from layers.shards import summed_in, whole
from parallelism.axis_rules import RULES, on_device
from training.optimizers import BALANCE

BATCH_AXES, STREAM_AXIS = dict(RULES)["batch"], dict(RULES)["stream"]
AXES = (*BATCH_AXES, STREAM_AXIS)  # that devices compute different parts of
WHOLE = ("embed", "vocab")  # dimensions that are brought whole, and not only their owner's part used


def in_shards(
    gradient: Callable, axes: dict, specs: dict, *, summed_once: bool, sum_dtype=None, of_frozen: Sequence = ()
) -> Callable:
    """Return a gradient function of global arrays from one that each device computes for its part.

    Args:
      gradient: as `make_gradient` of training/step.py returns it.
      axes, specs: trees like the parameters, of the names of each one's dimensions and of its PartitionSpec.
      summed_once: bring all parameters whole first, and scatter their gradients in the end, whatever is done between:
        gradients then cross the mesh once however many microbatches there are, but a device holds one whole.
      sum_dtype: of sums over the axes that split a weight, float32 over others and with `summed_once`; None: the type
        that the weight is used in.
      of_frozen: trees of PartitionSpecs, of each of what is frozen; that is brought whole layer by layer, so not with
        `summed_once`.
    """
    rows, copied = PartitionSpec(BATCH_AXES), PartitionSpec()
    parts = PartitionSpec(BATCH_AXES, STREAM_AXIS)

    def at_once(params, *arguments):
        params, scatter = jax.vjp(lambda shards: whole(shards, axes, jnp.float32), params)
        with nnx.logical_axis_rules(on_device(weights_whole=True)):
            gradients, *sums = gradient(params, *arguments)
        return *scatter(gradients), *sums

    def of_part(params, carry, batch, key, *frozen):
        key = jax.random.fold_in(key, jax.lax.axis_index(AXES))
        with nnx.logical_axis_rules(on_device()), summed_in(sum_dtype):
            gradients, weight, carry, scalars = (at_once if summed_once else gradient)(
                params, carry, batch, key, *frozen
            )
        weight, scalars = jax.lax.psum((weight, scalars), AXES)
        return jax.tree.map(_summed, gradients, specs), weight, carry, scalars

    def of_all(params, carry, batch, key, *frozen):
        of_batch = jax.tree.map(lambda array: parts if array.ndim > 1 else rows, batch)
        return jax.shard_map(
            of_part,
            in_specs=(specs, rows, of_batch, copied, *of_frozen),
            out_specs=(specs, copied, rows, copied),
            check_vma=False,
        )(params, carry, batch, key, *frozen)

    return of_all


def part_square(axes: dict, specs: dict, sizes: Mapping, *, summed_once: bool) -> tuple[Callable, int]:
    """Return (`part_square` of training/noise_scale.py where each device computes for itself, number of parts).

    A part is what the devices compute together over whose gradient is summed anyway: those of one `fsdp` and `model`,
    with `summed_once` of one `model`. Routers' biases are left out, as of the whole batch's norm. `sizes` are those of
    the mesh axes, other arguments as of `in_shards`.
    """
    together = (STREAM_AXIS,) if summed_once else ("fsdp", STREAM_AXIS)

    def split(names: tuple, spec: PartitionSpec) -> set:
        dims = zip(names, (*spec, *[None] * len(names)), strict=False)
        return {axis for name, of_dim in dims if not (summed_once and name in WHOLE) for axis in several(of_dim)}

    def own_square(gradient, names, spec):
        if BALANCE in names:
            return 0.0
        missing = tuple(axis for axis in together if axis not in split(names, spec))
        whole_gradient = jax.lax.psum(gradient, missing)
        return jnp.sum(jnp.square(whole_gradient)) / math.prod(sizes[axis] for axis in missing)

    def square(gradients, weight):
        squares = jax.tree.map(own_square, gradients, axes, specs)
        of_part = jax.lax.psum(weight, together)
        return sum(jax.tree.leaves(squares)) / jnp.maximum(of_part, 1), weight

    return square, math.prod(sizes[axis] for axis in AXES if axis not in together)


def _summed(gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Sum a gradient over the axes that do not split its weight: over the others it is already."""
    split = {axis for axes in spec for axis in several(axes)}
    return jax.lax.psum(gradient, tuple(axis for axis in AXES if axis not in split))
