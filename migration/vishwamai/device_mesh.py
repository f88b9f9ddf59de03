# SPDX-License-Identifier: Apache-2.0
"""TPUMeshContext: the mesh of a configuration, which can get another shape while arrays are on it."""

import math
import numbers
from collections.abc import Collection, Mapping

import jax
from jax.sharding import Mesh, PartitionSpec

from configs import topologies
from configs.base import MESH_AXES
from configs.errors import ConfigError, one_of, shown
from core import joining
from migration.vishwamai import keys
from parallelism.mesh import make_mesh
from parallelism.resharding import to_mesh
from rehearsal import sharding
from rehearsal.assumptions import of_topology
from settings import validation

AXES = ("data", "model", "fsdp", "context")  # of shapes with one to four numbers
SMALL_BYTES = 2**16  # up to this size a tensor is replicated: a collective would take longer than its bytes do


def attached(config: Mapping) -> list:
    """Join the other processes, if any, and return all devices; without an accelerator, `tpu.tpu_cores` simulated."""
    joining.join(keys.cores(config))
    return jax.devices()


class TPUMeshContext:
    """All devices as a `mesh`, whose axes are those of Torus; `config` is that of Torus, its mesh resolved.

    With `model_parallel`, two devices share a model. Without an accelerator, `tpu.tpu_cores` devices are simulated.
    """

    def __init__(self, config: Mapping):
        """Raises ConfigError: a key is unknown or not supported, or does not fit the devices."""
        self.config, self._devices = keys.recipe(config), attached(config)
        validation.resolve_mesh(self.config, len(self._devices))
        self._use(self._mesh_of({axis: self.config.mesh[axis] for axis in AXES}))

    def dynamic_mesh_reshaping(self, new_shape: tuple[int, ...], state=None):
        """Give the mesh another shape. Return `state` on it, its old arrays deleted; without a state, the mesh.

        ConfigError if that does not fit the devices, or an axis does not divide a dimension; then nothing is changed.

        Args:
          new_shape: one to four numbers, of AXES, whose product is the number of devices.
          state: tree of arrays. An array keeps its PartitionSpec; one without a PartitionSpec is replicated.
        """
        new_shape = _whole(new_shape)
        length, count = len(new_shape), len(self._devices)
        if min(new_shape, default=1) < 1:
            raise ConfigError(f"a mesh of {new_shape} has a size below 1")
        if not 1 <= length <= len(AXES) or math.prod(new_shape) != count:
            legal = validation.shapes(count, min(max(1, length), len(AXES)))
            legal = sorted({tuple(sorted(shape, reverse=True)) for shape in legal})
            raise ConfigError(
                f"a mesh of {new_shape} needs {math.prod(new_shape)} devices, but there are {count}, on at most "
                f"{len(AXES)} axes; use {' or '.join(map(str, legal))} in any order"
            )
        mesh = self._mesh_of(dict(zip(AXES, new_shape, strict=False)))
        try:
            moved = mesh if state is None else to_mesh(state, mesh)
        except ValueError as error:
            raise ConfigError(f"state: {' '.join(str(error).split())[:300]}") from None
        self._use(mesh)
        return moved

    def optimal_sharding_strategy(self, shape: tuple[int, ...], tensor_type: str = "weights"):
        """Return the PartitionSpec with which a step takes least time, by rehearsal/sharding.py at the rates of a v4.

        Vectors and small tensors are replicated. An axis that does not divide a dimension never splits it.

        Args:
          tensor_type: weights, gradients, optimizer or activations; ConfigError for another one.
        """
        one_of("tensor_type", tensor_type, (*sharding.ALL_GATHERS, "activations"))
        tensor = sharding.tensor_of(self.config, tuple(shape), tensor_type)
        if len(shape) < 2 or tensor.bytes < SMALL_BYTES:
            return PartitionSpec()
        best = sharding.options(tensor, dict(self.mesh.shape), of_topology(topologies.get("v4-8")))[0]
        return PartitionSpec(*best.spec)

    def _mesh_of(self, sizes: dict[str, int]) -> Mesh:
        order = dict.fromkeys(("dcn_data", *sizes, *MESH_AXES))
        return make_mesh({axis: sizes.get(axis, 1) for axis in order}, self._devices)

    def _use(self, mesh: Mesh) -> None:
        self.config.mesh.update(dict(mesh.shape))
        self.config.layout.axis_order = ",".join(mesh.axis_names)
        self.mesh = mesh


def _whole(shape) -> tuple[int, ...]:
    """Return the sizes of a mesh; ConfigError for anything but whole numbers."""
    is_right = isinstance(shape, Collection) and all(
        isinstance(size, numbers.Integral) and not isinstance(size, bool) for size in shape
    )
    if not is_right:
        raise ConfigError(f"a mesh of {shown(shape)} does not consist of whole numbers; give a tuple such as (4, 2)")
    return tuple(map(int, shape))
