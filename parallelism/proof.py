# SPDX-License-Identifier: Apache-2.0
"""Proves that two layouts compute the same: the forward pass, every gradient and one update.

The caller passes two step functions, each with its own mesh. Both start from the same state and the same batch. Their
results are compared array by array, by the relative error in the L2 norm.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from parallelism.mesh import mesh_context

# Float32 sums in another order differ by about 1e-6. The limit for an update is wider: an update is a small difference
# of rounded weights, and Adam turns the rounding error of a gradient near 0 into a step. A wrong layout causes an error
# of the order of the value itself, not of a thousandth.
LIMITS = {"forward": 1e-5, "gradient": 1e-5, "update": 1e-3, "state": 1e-5}
# A loss may be near 0 because its terms cancel, as GRPO's is. Its error is then that of the terms, which are about 1.
SCALE = {"forward": 1.0}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A step on a mesh.

    Attributes:
      step: (state, batch) -> (state, scalars, gradients), run inside `mesh_context(mesh)`; the state is a dataclass
        with `params`.
      state, batch: trees of shardings with the structure of the step's arguments.
    """

    mesh: jax.sharding.Mesh
    step: Callable
    state: object
    batch: object


def differences(reference: Layout, candidate: Layout, state, batch) -> list[str]:
    """Return a line for each array in which the candidate differs from the reference; empty if both agree.

    `state` and `batch` are host arrays of the global shapes.
    """
    wanted, got = (_observe(layout, state, batch) for layout in (reference, candidate))
    lines = []
    for part, limit in LIMITS.items():
        leaves, structure = jax.tree_util.tree_flatten_with_path(wanted[part])
        if jax.tree.structure(got[part]) != structure:
            lines.append(f"{part}: {jax.tree.structure(got[part])} in place of {structure}")
            continue
        for (path, expected), actual in zip(leaves, jax.tree.leaves(got[part]), strict=True):
            error = relative_error(actual, expected, least=SCALE.get(part, 0.0))
            if not error <= limit:
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                lines.append(f"{part} {name}: relative error {error:.1e}, limit {limit:.0e}")
    return lines


def relative_error(actual, expected, least: float = 0.0) -> float:
    """Return |actual - expected| / max(|expected|, least) in the L2 norm.

    It is infinite if shapes differ or `actual` is not finite.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return np.inf
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), least, 1e-30))


def _observe(layout: Layout, state, batch) -> dict:
    """Run one step from host arrays and return its results as host arrays, by the keys of LIMITS."""
    placed = jax.device_put((state, batch), (layout.state, layout.batch))
    with mesh_context(layout.mesh):
        after, scalars, gradients = jax.tree.map(_agreed, layout.step(*placed))
    update = jax.tree.map(lambda new, old: np.float64(new) - old, after.params, state.params)
    state = dataclasses.replace(after, params={})  # leaves counts, moments, an average, a carry
    return {"forward": scalars, "gradient": gradients, "update": update, "state": state}


def _agreed(array: jax.Array) -> np.ndarray:
    """Return the array on the host, with NaN wherever the replicas on different devices disagree."""
    whole = np.array(array)
    for shard in array.addressable_shards:
        if not np.array_equal(shard.data, whole[shard.index]):
            whole[shard.index] = np.nan
    return whole
