# SPDX-License-Identifier: Apache-2.0
"""Logical axes: a weight is declared with the names of its axes, an activation is constrained by names.

Which mesh axis a name stands for is not known here: parallelism/axis_rules.py puts the mesh and the rules into
context (`jax.set_mesh`, `nnx.logical_axis_rules`). A context is needed wherever a weight is made; one device
is a mesh of size 1.
"""

import math

import jax
from flax import nnx
from flax.core import spmd


def weight(rngs: nnx.Rngs, shape: tuple, axes: tuple, stddev: float) -> nnx.Param:
    """Declare a float32 weight, normally distributed around 0, its dimensions named by `axes`."""
    return nnx.Param(stddev * jax.random.normal(rngs.params(), shape), out_sharding=axes)


def truncated_weight(rngs: nnx.Rngs, shape: tuple, axes: tuple, stddev: float) -> nnx.Param:
    """Declare a float32 weight as `weight` does, of a normal cut at two deviations and widened to this one again."""
    kept = 0.87962566103423978  # the deviation of a unit normal cut at 2
    return nnx.Param(stddev / kept * jax.random.truncated_normal(rngs.params(), -2, 2, shape), out_sharding=axes)


def scale(size: int, axes: tuple) -> nnx.Param:
    """Declare a float32 vector of ones."""
    return nnx.Param(jax.numpy.ones((size,)), out_sharding=axes)


def zeros(shape: tuple, axes: tuple) -> nnx.Param:
    """Declare float32 zeros; where they are a bias, `axes` are those of the activation that they are added to."""
    return nnx.Param(jax.numpy.zeros(shape), out_sharding=axes)


def declared_axes(state: nnx.State) -> dict[tuple, tuple[tuple, tuple]]:
    """Return {path: (shape, axis names)} of the Params of a model; flax has renamed this metadata more than once."""
    return {path: (param.shape, param.get_metadata("out_sharding")) for path, param in nnx.to_flat_state(state)}


def mesh_axes(axes: tuple) -> jax.sharding.PartitionSpec:
    """Return where the rules in context put dimensions of these names; None stays unsplit."""
    rules = dict(spmd.get_logical_axis_rules())
    return jax.sharding.PartitionSpec(*[None if name is None else rules[name] for name in axes])


def platform() -> str:
    """Return cpu, gpu or tpu: what the devices of the mesh in context are."""
    return jax.sharding.get_abstract_mesh().abstract_device.platform


def in_shards() -> bool:
    """Whether this is traced for one device of the mesh, inside a `jax.shard_map` over all its axes."""
    return jax.sharding.get_abstract_mesh().are_all_axes_manual


def several(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes of one entry of a PartitionSpec."""
    return (axes,) if isinstance(axes, str) else axes or ()


def num_shards(axes: str | tuple[str, ...] | None) -> int:
    """Return over how many devices of the mesh in context one entry of a PartitionSpec splits a dimension."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[axis] for axis in several(axes))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Fix the layout of an activation whose dimensions have these names; on one device's part of it there is none."""
    if in_shards():
        return x
    return jax.lax.with_sharding_constraint(x, mesh_axes(axes))
