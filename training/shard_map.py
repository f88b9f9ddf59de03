# SPDX-License-Identifier: Apache-2.0
"""The gradient on a mesh that shards only batch, weights and heads: each device computes its own part.

One `jax.shard_map` covers the whole mesh. Inside it, layers all-gather their weights (layers/fsdp.py) and the residual
stream (layers/sequence_parallel.py). If the compiler placed the collectives, the step would wait for each reduction;
with explicit ones, reductions overlap with computation.
"""

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from layers.axes import as_axis_tuple
from layers.fsdp import all_gather_params, grad_reduce_dtype
from layers.taps import Measure
from parallelism.axis_rules import RULES, shard_map_rules
from training.optimizers import BALANCE
from training.step import MEASURED, mean

BATCH_AXES, STREAM_AXIS = dict(RULES)["batch"], dict(RULES)["stream"]
AXES = (*BATCH_AXES, STREAM_AXIS)  # mesh axes along which devices compute different parts
GATHERED = ("embed", "vocab")  # dimensions that are all-gathered; devices use only their own part of the others


def shard_map_gradient(
    gradient: Callable, axes: dict, specs: dict, *, reduce_once: bool, reduce_dtype=None, frozen_specs: dict,
    measures: Mapping[str, Measure] = MappingProxyType({}),
) -> Callable:  # fmt: skip
    """Return a gradient function of global arrays that maps a per-device gradient over the mesh.

    Args:
      gradient: as `make_gradient` of training/step.py returns it.
      axes, specs: trees like the parameters, of the names of each one's dimensions and of its PartitionSpec.
      reduce_once: all-gather all parameters before the microbatches and reduce-scatter all gradients after them.
        Gradients then cross the mesh once for any number of microbatches, but a device holds a full gradient.
      reduce_dtype: of sums over devices; None: the type that a layer's weight is used in. Those of `reduce_once` are
        in float32.
      frozen_specs: PartitionSpecs of the frozen weights, which are gathered layer by layer, so they cannot be
        combined with `reduce_once`.
      measures: those of `gradient`. Each device measures its own tokens and its own units.
    """
    rows, replicated = PartitionSpec(BATCH_AXES), PartitionSpec()
    parts = PartitionSpec(BATCH_AXES, STREAM_AXIS)

    of_measured = {key: _pair_specs(measure.axes) for key, measure in measures.items()}

    def reduced_once(params, *arguments):
        params, reduce_scatter = jax.vjp(lambda shards: all_gather_params(shards, axes, jnp.float32), params)
        with nnx.logical_axis_rules(shard_map_rules(gathered_params=True)):
            gradients, *sums = gradient(params, *arguments)
        return *reduce_scatter(gradients), *sums

    def of_device(params, carry, batch, key, frozen):
        key = jax.random.fold_in(key, jax.lax.axis_index(AXES))
        with nnx.logical_axis_rules(shard_map_rules()), grad_reduce_dtype(reduce_dtype):
            gradients, weight, carry, scalars = (reduced_once if reduce_once else gradient)(
                params, carry, batch, key, frozen
            )
        measured = scalars.pop(MEASURED, {})
        weight, scalars = jax.lax.psum((weight, scalars), AXES)
        for key, pair in measured.items():
            measured[key] = tuple(_psum_replicated(x, of_measured[key][0]) for x in pair)  # both over the same devices
        all_reduced = functools.partial(_psum_replicated, dtype=reduce_dtype)
        return jax.tree.map(all_reduced, gradients, specs), weight, carry, scalars, measured

    def of_mesh(params, carry, batch, key, frozen):
        batch_specs = jax.tree.map(lambda array: parts if array.ndim > 1 else rows, batch)
        *results, scalars, measured = jax.shard_map(
            of_device,
            in_specs=(specs, rows, batch_specs, replicated, frozen_specs),
            out_specs=(specs, replicated, rows, replicated, of_measured),
            check_vma=False,
        )(params, carry, batch, key, frozen)
        return *results, scalars | ({MEASURED: measured} if measures else {})

    return of_mesh


def part_square(axes: dict, specs: dict, sizes: Mapping, *, reduce_once: bool) -> tuple[Callable, int]:
    """Return (`part_square` of training/transforms/noise.py inside a shard_map, number of parts).

    A part is the work of the devices whose gradients are reduced before the square is taken: those of one `fsdp`,
    `expert` and `model` group, with `reduce_once` those of one `expert` and `model` group, which share their experts.
    Router biases are excluded, as from the norm of the batch's gradient. `sizes` are those of the mesh axes; other
    arguments are as of `shard_map_gradient`.
    """
    together = ("expert", STREAM_AXIS) if reduce_once else ("fsdp", "expert", STREAM_AXIS)

    def sharding_axes(names: tuple, spec: PartitionSpec) -> set:
        dims = zip(names, (*spec, *[None] * len(names)), strict=False)
        kept = [of_dim for name, of_dim in dims if not (reduce_once and name in GATHERED)]
        return {axis for of_dim in kept for axis in as_axis_tuple(of_dim)}

    def own_square(gradient, names, spec):
        if BALANCE in names:
            return 0.0
        missing = tuple(axis for axis in together if axis not in sharding_axes(names, spec))
        full_gradient = jax.lax.psum(gradient.astype(jnp.float32), missing)
        return jnp.sum(jnp.square(full_gradient)) / math.prod(sizes[axis] for axis in missing)

    def square(gradients, weight):
        squares = jax.tree.map(own_square, gradients, axes, specs)
        of_part = jax.lax.psum(weight, together)
        return mean((sum(jax.tree.leaves(squares)), of_part)), weight

    return square, math.prod(sizes[axis] for axis in AXES if axis not in together)


def _pair_specs(names: tuple[str | None, ...]) -> tuple[PartitionSpec, PartitionSpec]:
    """Return the PartitionSpecs of a (sum, weight) pair; dimensions of the sum have these names."""
    spec = [None if name is None else dict(RULES)[name] for name in names]
    return PartitionSpec(*spec), PartitionSpec(*spec[:-1], None)


def _psum_replicated(gradient: jax.Array, spec: PartitionSpec, dtype=None) -> jax.Array:
    """All-reduce a gradient over the axes that replicate its weight; over the others it is already reduced.

    `dtype` is the type of the sum; None: that of the gradient.
    """
    split = {axis for axes in spec for axis in as_axis_tuple(axes)}
    copies = tuple(axis for axis in AXES if axis not in split and jax.lax.axis_size(axis) > 1)
    return jax.lax.psum(gradient.astype(dtype or gradient.dtype), copies) if copies else gradient
