# SPDX-License-Identifier: Apache-2.0
"""Adapters in a checkpoint, and merging them with their base weights."""

from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from layers.adapters import INPUTS, factors
from settings import fine_tuning

PARTS = ("a", "b")


def among(names: Collection[str]) -> bool:
    """Return whether arrays of a checkpoint with these dotted names are adapters."""
    return any(".adapters." in name for name in names)


def scale(stored: dict) -> float:
    """Return the factor of A B; `stored` is a flat configuration."""
    return stored["lora.alpha"] / stored["lora.rank"]


def adapter_path(weight: tuple[str, ...]) -> tuple[str, ...]:
    return (*weight[:-1], "adapters", weight[-1])


def abstract(params: dict, stored: dict) -> dict:
    """Return shapes and shardings of the adapters of these stacked parameters; the rank is not sharded."""
    targets, rank, found = fine_tuning.targets(stored["lora.targets"]), stored["lora.rank"], {}
    for path, weight in flatten_dict(params).items():
        if path[-1] in targets:
            last, mesh = 1 + INPUTS[path[-1]], weight.sharding.mesh
            axes = (*weight.sharding.spec, *[None] * (len(weight.shape) - len(weight.sharding.spec)))
            shapes, specs = factors(weight.shape, 1, last, rank), factors(axes, 1, last, None)
            for part, shape, spec in zip(PARTS, shapes, specs, strict=True):
                sharding = NamedSharding(mesh, PartitionSpec(*spec))
                found[(*adapter_path(path), part)] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    return unflatten_dict(found)


def merge(weights: dict, adapters: dict, factor: float) -> dict:
    """Return the weights, with W + factor * A B for each W that has an adapter, computed in float32, in W's type."""
    flat, parts = flatten_dict(weights), flatten_dict(adapters)
    product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1, precision=jax.lax.Precision.HIGHEST))
    for path, weight in flat.items():
        a, b = (parts.get((*adapter_path(path), part)) for part in PARTS)
        if a is not None:
            flat[path] = (weight.astype(jnp.float32) + factor * product(a, b)).astype(weight.dtype)
    return unflatten_dict(flat)


def merge_by_index(weight: Callable, a: Callable, b: Callable, inputs: int, factor: float) -> Callable:
    """Return index -> float32 part of a merged weight; the three arrays are such functions too.

    An index begins with a layer. The product contracts the first `inputs` dimensions of a layer's weight.
    """

    def read(where: tuple) -> np.ndarray:
        layer, *dims = where
        a_part = a((layer, *dims[:inputs]))  # dimensions without an index are read completely, like the rank
        b_part = b((layer, slice(None), *dims[inputs:]))
        return weight(where) + np.float32(factor) * np.tensordot(a_part, b_part, 1)

    return read
