# SPDX-License-Identifier: Apache-2.0
"""Sizes of a configuration that are known without training: parameters of the model, and operations of the training.

Nothing is allocated and no device is opened, because trials may use all of them.
"""

import importlib

from configs.base import MESH_AXES
from settings.keys import from_flat
from studies.cost import planning

PARAMETERS = "parameters"  # a size that is not a key


def of_axis(values: dict[str, object], axis: str) -> float:
    """Return the size of a configuration with these values along an axis, which is a numeric key or PARAMETERS."""
    return float(num_parameters(values) if axis == PARAMETERS else values[axis])


def num_parameters(values: dict[str, object]) -> int:
    """Return the number of parameters of the model, without adapters; `values` are those of every key."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from parallelism.axis_rules import RULES

    config = from_flat(values)
    make = importlib.import_module(f"models.{config.model.name}").make
    sizes, kinds = (1,) * len(MESH_AXES), (jax.sharding.AxisType.Auto,) * len(MESH_AXES)
    mesh = jax.sharding.AbstractMesh(sizes, MESH_AXES, axis_types=kinds)
    with jax.sharding.use_abstract_mesh(mesh), nnx.logical_axis_rules(RULES):
        how = {"dtype": jnp.float32, "scan": True, "kernel": ""}
        model = nnx.eval_shape(lambda: make(config.model, **how, rngs=nnx.Rngs(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def training_flops(values: dict[str, object]) -> float | None:
    """Return the model's floating-point operations of a whole training; None if only the data say how many steps."""
    steps = planning.steps_of(values)
    if steps is None:
        return None
    model, length = from_flat(values).model, values["train.sequence_length"]
    of_token = importlib.import_module(f"models.{model.name}").flops_per_token(model, length)
    return of_token * length * values["train.global_batch"] * planning.full_batches(values, steps)
