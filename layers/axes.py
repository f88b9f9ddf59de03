# SPDX-License-Identifier: Apache-2.0
"""Logical axes: a weight is declared with names of its dimensions, an activation is constrained by names.

The mesh and the rules from names to mesh axes come from context (`jax.set_mesh`, `nnx.logical_axis_rules`), which
parallelism/mesh.py and parallelism/axis_rules.py set. Declaring a weight needs that context; one device is a mesh of
size 1.
"""

import contextlib
import math

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import spmd

TRUNCATED = 0.87962566103423978  # the standard deviation of a unit normal distribution truncated at 2


def weight(rngs: nnx.Rngs, shape: tuple, axes: tuple, stddev: float) -> nnx.Param:
    """Declare a float32 weight, normally distributed around 0, its dimensions named by `axes`."""
    return nnx.Param(stddev * jax.random.normal(rngs.params(), shape), out_sharding=axes, stddev=stddev)


def truncated_weight(rngs: nnx.Rngs, shape: tuple, axes: tuple, stddev: float) -> nnx.Param:
    """Declare a float32 weight from a normal distribution truncated at 2 deviations, rescaled to `stddev`."""
    draws = jax.random.truncated_normal(rngs.params(), -2, 2, shape)
    return nnx.Param(stddev / TRUNCATED * draws, out_sharding=axes, stddev=stddev)


def scale(size: int, axes: tuple) -> nnx.Param:
    """Declare a float32 vector of ones."""
    return nnx.Param(jnp.ones((size,)), out_sharding=axes)


def zeros(shape: tuple, axes: tuple) -> nnx.Param:
    """Declare float32 zeros. The `axes` of a bias are those of the activation that it is added to."""
    return nnx.Param(jnp.zeros(shape), out_sharding=axes)


def declared_axes(state: nnx.State) -> dict[tuple, tuple[tuple, tuple]]:
    """Return {path: (shape, axis names)} of the Params of a model; ValueError for one that declares no names.

    Read the metadata here alone: flax has renamed it more than once.
    """
    declared = {}
    for path, param in nnx.to_flat_state(state):
        names = param.get_metadata("out_sharding", None)
        if names is None:
            raise ValueError(
                f"the parameter {'.'.join(map(str, path))} of shape {param.shape} has no axis names; a model holds "
                "only what weight, scale or zeros of layers/axes.py declare, with a name or None for each dimension"
            )
        declared[path] = (param.shape, names)
    return declared


def declared_stddevs(state: nnx.State) -> dict[tuple, float]:
    """Return {path: standard deviation of the initial distribution} of a model's Params; 0 if it is not normal."""
    return {path: param.get_metadata("stddev", 0.0) for path, param in nnx.to_flat_state(state)}


def mesh_axes(axes: tuple) -> jax.sharding.PartitionSpec:
    """Return the PartitionSpec that the rules in context give dimensions of these names; None is not sharded."""
    rules = dict(spmd.get_logical_axis_rules())
    return jax.sharding.PartitionSpec(*[None if name is None else rules[name] for name in axes])


@contextlib.contextmanager
def unsharded():
    """Let no name of a dimension stand for a mesh axis: for code with its own copy of all parameters on each device."""
    with nnx.logical_axis_rules([(name, None) for name, _ in spmd.get_logical_axis_rules()]):
        yield


def platform() -> str:
    """Return the platform of the mesh in context: cpu, gpu or tpu."""
    return jax.sharding.get_abstract_mesh().abstract_device.platform


def bytes_of_device(tree) -> int:
    """Return the bytes of one device's part of the arrays of a tree, which may be abstract."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def inside_shard_map() -> bool:
    """Return whether this is traced inside a `jax.shard_map` over all axes of the mesh."""
    return jax.sharding.get_abstract_mesh().are_all_axes_manual


def as_axis_tuple(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes of one entry of a PartitionSpec as a tuple."""
    return (axes,) if isinstance(axes, str) else axes or ()


def num_shards(axes: str | tuple[str, ...] | None) -> int:
    """Return the number of shards that one entry of a PartitionSpec makes on the mesh in context."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[axis] for axis in as_axis_tuple(axes))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrain the sharding of an activation whose dimensions have these names; inside a shard_map there is none."""
    if inside_shard_map():
        return x
    return jax.lax.with_sharding_constraint(x, mesh_axes(axes))
