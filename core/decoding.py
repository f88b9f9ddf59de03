# SPDX-License-Identifier: Apache-2.0
"""The weights of a run in the form that a TPU reads fastest when it decodes: types, arrays and memory layouts."""

from collections.abc import Callable

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from core.assembly import Run
from core.models import in_compute_type
from layers.axes import declared_axes
from training import platform_defaults

PROJECTIONS = (("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim"))  # dimensions of a layer's weight


def weights(run: Run) -> dict:
    """Return the parameters of a run's model as shapes with types, shardings and layouts, for an Engine.

    Weights of products are in the compute type. Each layer has arrays of its own, which the compiler copies into a
    chip's own memory while it computes other layers; it does not do this with parts of an array. A projection to heads
    has a matrix [embed, head_dim] for each head. In the usual layout, the compiler would copy it to this one in every
    step.
    """
    params = flatten_dict(stacked_weights(run))
    for path, (_, names) in declared_axes(run.models.declared).items():
        if names[:1] == ("layers",):
            params[path] = (_of_layer(params[path], names[1:]),) * params[path].shape[0]
    return unflatten_dict(params)


def stacked_weights(run: Run) -> dict:
    """Return the parameters of a run's model as shapes with the types for decoding; layers are stacked, as trained."""
    return in_compute_type(run.models.declared, platform_defaults.dtype(run.config, run.mesh), run.mesh)


def placer(run: Run) -> Callable[[dict], dict]:
    """Return a function that copies parameters of a run as `weights` says; the mesh of the run is in context."""
    wanted = flatten_dict(weights(run))

    def placed(params):
        stacked = flatten_dict(params)
        return {
            path: tuple(part.astype(one.dtype) for part, one in zip(stacked[path], of_layers, strict=True))
            if isinstance(of_layers, tuple) else stacked[path].astype(of_layers.dtype)
            for path, of_layers in wanted.items()
        }  # fmt: skip

    jitted = jax.jit(placed, out_shardings=jax.tree.map(lambda one: one.sharding, wanted))
    return lambda params: unflatten_dict(jitted(params))


def _of_layer(stacked: jax.ShapeDtypeStruct, names: tuple) -> jax.ShapeDtypeStruct:
    """Return the array of one layer, whose dimensions have these names."""
    sharding = NamedSharding(stacked.sharding.mesh, PartitionSpec(*stacked.sharding.spec[1:]))
    if names in PROJECTIONS and platform_defaults.platform(sharding.mesh) == "tpu":
        sharding = Format(Layout((1, 0, 2)), sharding)
    return jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype, sharding=sharding)
