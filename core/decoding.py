# SPDX-License-Identifier: Apache-2.0
"""The weights of a run as decoding reads them fastest: their types, and their layouts in memory."""

import jax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental.layout import Format, Layout

from core.assembly import Run
from core.models import in_compute_type
from layers.axes import declared_axes
from training import platform_defaults

PROJECTIONS = (("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim"))  # last dimensions of a weight


def weights(run: Run) -> dict:
    """Return the parameters of a run's model as shapes with types, shardings and layouts.

    Weights of products are in the compute type. On TPUs a projection to heads has a matrix [embed, head_dim] for each
    head. In the usual layout, the compiler would copy it to this one in every step.
    """
    declared = nnx.merge_state(run.models.trained, run.models.base)
    params = flatten_dict(in_compute_type(declared, platform_defaults.dtype(run.config, run.mesh), run.mesh))
    if platform_defaults.platform(run.mesh) == "tpu":
        for path, (_, names) in declared_axes(declared).items():
            if names[-3:] in PROJECTIONS:
                params[path] = _heads_first(params[path])
    return unflatten_dict(params)


def _heads_first(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    *stacked, embed, heads, head_dim = range(leaf.ndim)
    layout = Layout((*stacked, heads, embed, head_dim))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=Format(layout, leaf.sharding))
