# SPDX-License-Identifier: Apache-2.0
"""TPUMeshContext: the mesh of a configuration, which can get another shape while arrays are on it."""

import math
from collections.abc import Mapping

import jax
from jax.sharding import PartitionSpec

from configs import topologies
from configs.base import MESH_AXES
from configs.errors import ConfigError, one_of
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
        self._set_mesh({axis: self.config.mesh[axis] for axis in AXES})

    def dynamic_mesh_reshaping(self, new_shape: tuple[int, ...], state=None):
        """Give the mesh another shape. Return `state` on it, its old arrays deleted; without a state, the mesh.

        ConfigError if that does not fit the devices, or an axis does not divide a dimension; then nothing is changed.

        Args:
          new_shape: one to four numbers, of AXES, whose product is the number of devices.
          state: tree of arrays. An array keeps its PartitionSpec; one without a PartitionSpec is replicated.
        """
        length, count = len(new_shape), len(self._devices)
        if min(new_shape, default=1) < 1:
            raise ConfigError(f"a mesh of {tuple(new_shape)} has a size below 1")
        if not 1 <= length <= len(AXES) or math.prod(new_shape) != count:
            legal = validation.shapes(count, min(max(1, length), len(AXES)))
            legal = sorted({tuple(sorted(shape, reverse=True)) for shape in legal})
            raise ConfigError(
                f"a mesh of {tuple(new_shape)} needs {math.prod(new_shape)} devices, but there are {count}, on at most "
                f"{len(AXES)} axes; use {' or '.join(map(str, legal))} in any order"
            )
        before = dict(self.mesh.shape)
        self._set_mesh(dict(zip(AXES, new_shape, strict=False)))
        if state is None:
            return self.mesh
        try:
            return to_mesh(state, self.mesh)
        except ValueError as error:
            self._set_mesh(before)
            raise ConfigError(f"state: {' '.join(str(error).split())[:300]}") from None

    def optimal_sharding_strategy(self, shape: tuple[int, ...], tensor_type: str = "weights"):
        """Return the PartitionSpec with which a step takes least time, by rehearsal/sharding.py at the rates of a v4.

        Small tensors are replicated. An axis that does not divide a dimension never splits it.

        Args:
          tensor_type: weights, gradients, optimizer or activations; ConfigError for another one.
        """
        one_of("tensor_type", tensor_type, (*sharding.ALL_GATHERS, "activations"))
        tensor = sharding.tensor_of(self.config, tuple(shape), tensor_type)
        if len(shape) < 2 or tensor.bytes < SMALL_BYTES:
            return PartitionSpec()
        best = sharding.options(tensor, dict(self.mesh.shape), of_topology(topologies.get("v4-8")))[0]
        return PartitionSpec(*best.spec)

    def _set_mesh(self, sizes: dict[str, int]) -> None:
        order = tuple(dict.fromkeys(("dcn_data", *sizes, *MESH_AXES)))
        self.config.mesh.update({axis: sizes.get(axis, 1) for axis in MESH_AXES})
        self.config.layout.axis_order = ",".join(order)
        self.mesh = make_mesh({axis: self.config.mesh[axis] for axis in order}, self._devices)
