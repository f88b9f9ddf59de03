# SPDX-License-Identifier: Apache-2.0
"""TPUMeshContext: the mesh of a configuration, which can get another shape while arrays are on it."""

import math
import os
from collections.abc import Mapping

from cluster import startup
from configs import topologies
from configs.base import MESH_AXES
from configs.errors import ConfigError
from migration import guides
from migration.vishwamai import keys
from rehearsal import sharding
from rehearsal.assumptions import of_topology
from settings import validation
from settings.keys import one_of

AXES = ("data", "model", "fsdp", "context")  # of shapes with one to four numbers
SMALL_BYTES = 2**16  # up to this size a tensor is replicated: a collective would take longer than its bytes do


def attached(cores: int) -> list:
    """Return all devices; without an accelerator, `cores` simulated ones, or as many as the environment asks for."""
    is_asked = "device_count" in os.environ.get("XLA_FLAGS", "") or os.environ.get("JAX_NUM_CPU_DEVICES")
    if guides.choose_platform() == "cpu":
        startup.simulate(0 if is_asked else cores)
    import jax

    return jax.devices()


class TPUMeshContext:
    """All devices as a `mesh`, whose axes are those of Torus; `config` is that of Torus, its mesh resolved.

    With `model_parallel`, two devices share a model. Without an accelerator, `tpu.tpu_cores` devices are simulated.
    """

    def __init__(self, config: Mapping):
        """Raises ConfigError: a key is unknown or not supported, or does not fit the devices."""
        self.config, self._devices = keys.recipe(config), attached(keys.cores(config))
        validation.resolve_mesh(self.config, len(self._devices))
        self._set_mesh({axis: self.config.mesh[axis] for axis in AXES})

    def dynamic_mesh_reshaping(self, new_shape: tuple[int, ...], state=None):
        """Give the mesh another shape. Return `state` on it, its old arrays deleted; without a state, the mesh.

        Args:
          new_shape: one to four numbers, of AXES, whose product is the number of devices.
          state: tree of arrays. An array keeps its PartitionSpec; one without a PartitionSpec is replicated.

        Raises:
          ConfigError: the shape does not fit the devices, or an axis does not divide a dimension. Nothing is changed.
        """
        length, count = len(new_shape), len(self._devices)
        if not 1 <= length <= len(AXES) or math.prod(new_shape) != count:
            legal = validation.shapes(count, min(max(1, length), len(AXES)))
            legal = sorted({tuple(sorted(shape, reverse=True)) for shape in legal})
            raise ConfigError(
                f"a mesh of {tuple(new_shape)} needs {math.prod(new_shape)} devices, but there are {count}, on at most "
                f"{len(AXES)} axes; use {' or '.join(map(str, legal))} in any order"
            )
        before = self.mesh
        self._set_mesh(dict(zip(AXES, new_shape, strict=False)))
        try:
            return self.mesh if state is None else self._moved(state, before)
        except ConfigError:
            self._set_mesh(dict(before.shape))
            raise

    def optimal_sharding_strategy(self, shape: tuple[int, ...], tensor_type: str = "weights"):
        """Return the PartitionSpec with which a step takes least time, by rehearsal/sharding.py at the rates of a v4.

        Small tensors are replicated. An axis that does not divide a dimension never splits it.

        Args:
          tensor_type: weights, gradients, optimizer or activations; ConfigError for another one.
        """
        from jax.sharding import PartitionSpec

        one_of("tensor_type", tensor_type, (*sharding.ALL_GATHERS, "activations"))
        dtype = "bfloat16" if tensor_type == "activations" else "float32"
        if len(shape) < 2 or math.prod(shape) * sharding.BYTES[dtype] < SMALL_BYTES:
            return PartitionSpec()
        train, sizes = self.config.train, dict(self.mesh.shape)
        tokens = train.global_batch * train.sequence_length * sizes["model"] // len(self._devices)
        tensor = sharding.Tensor(tuple(shape), tensor_type, dtype, tokens)
        best = sharding.options(tensor, sizes, of_topology(topologies.get("v4-8")))[0]
        return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in best.spec))

    def _set_mesh(self, sizes: dict[str, int]) -> None:
        from parallelism.mesh import make_mesh

        order = tuple(dict.fromkeys(("dcn_data", *sizes, *MESH_AXES)))
        self.config.mesh.update({axis: sizes.get(axis, 1) for axis in MESH_AXES})
        self.config.layout.axis_order = ",".join(order)
        self.mesh = make_mesh({axis: self.config.mesh[axis] for axis in order}, self._devices)

    def _moved(self, state, before):
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        from parallelism.resharding import reshard

        def placed(leaf):
            known = isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding)
            return leaf if known else jax.device_put(leaf, NamedSharding(before, PartitionSpec()))

        def layout(leaf):
            sharding = NamedSharding(self.mesh, leaf.sharding.spec)
            sharding.shard_shape(leaf.shape)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        state = jax.tree.map(placed, state)
        try:
            layouts = jax.tree.map(layout, state)
        except ValueError as error:
            raise ConfigError(f"state: {' '.join(str(error).split())[:300]}") from None
        return reshard(state, layouts)
