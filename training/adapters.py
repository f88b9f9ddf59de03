# SPDX-License-Identifier: Apache-2.0
"""Adapters as a checkpoint keeps them, and the weights that they come to with those that they are beside."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from configs import fine_tuning
from layers.adapters import INPUTS

PARTS = ("a", "b")


def scale(stored: dict) -> float:
    """Return what is multiplied by A B; `stored` is a flat configuration."""
    return stored["lora.alpha"] / stored["lora.rank"]


def path_of(weight: tuple[str, ...]) -> tuple[str, ...]:
    """Return where the adapter of the weight at a path is."""
    return (*weight[:-1], "adapters", weight[-1])


def abstract(params: dict, stored: dict) -> dict:
    """Return shapes and layouts of the adapters beside these parameters, which are stacked; the rank is not split."""
    targets, rank, found = fine_tuning.targets(stored["lora.targets"]), stored["lora.rank"], {}
    for path, weight in flatten_dict(params).items():
        if path[-1] in targets:
            inputs, mesh = 1 + INPUTS[path[-1]], weight.sharding.mesh
            axes = (*weight.sharding.spec, *[None] * (len(weight.shape) - len(weight.sharding.spec)))
            for part, shape, spec in (
                ("a", (*weight.shape[:inputs], rank), (*axes[:inputs], None)),
                ("b", (weight.shape[0], rank, *weight.shape[inputs:]), (axes[0], None, *axes[inputs:])),
            ):
                sharding = NamedSharding(mesh, PartitionSpec(*spec))
                found[(*path_of(path), part)] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    return unflatten_dict(found)


def merged(weights: dict, adapters: dict, factor: float) -> dict:
    """Return W + factor * A B, computed in float32, in place of each weight W that has an adapter, in its type."""
    flat, parts = flatten_dict(weights), flatten_dict(adapters)
    product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1, precision=jax.lax.Precision.HIGHEST))
    for path, weight in flat.items():
        a, b = (parts.get((*path_of(path), part)) for part in PARTS)
        if a is not None:
            flat[path] = (weight.astype(jnp.float32) + factor * product(a, b)).astype(weight.dtype)
    return unflatten_dict(flat)


def merged_in_parts(weight: Callable, a: Callable, b: Callable, inputs: int, factor: float) -> Callable:
    """Return index -> float32 of what `merged` comes to there, the three arrays being such functions too.

    An index begins with a layer, of whose weight a product sums over the first `inputs` dimensions.
    """

    def read(where: tuple) -> np.ndarray:
        layer, *dims = where
        a_part = a((layer, *dims[:inputs]))  # what is not named is read whole, the rank too
        b_part = b((layer, slice(None), *dims[inputs:]))
        return weight(where) + np.float32(factor) * np.tensordot(a_part, b_part, 1)

    return read
