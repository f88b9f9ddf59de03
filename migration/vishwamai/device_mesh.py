# SPDX-License-Identifier: Apache-2.0
"""TPUMeshContext: the mesh of a configuration, which can get another shape while arrays are on it."""

import math
import os
from collections.abc import Mapping

from cluster import startup
from configs import topologies
from configs.base import MESH_AXES
from configs.errors import ConfigError
from input_pipeline.cache import cache_path
from migration.vishwamai import keys
from rehearsal import sharding
from rehearsal.assumptions import of_topology
from settings import validation
from settings.keys import one_of

AXES = ("data", "model", "fsdp", "context")  # of shapes with one to four numbers
SMALL_BYTES = 2**16  # up to this size a tensor is replicated: a collective would take longer than its bytes do


def attached(cores: int) -> list:
    """Return all devices; without an accelerator, `cores` simulated ones, or as many as the environment asks for."""
    accelerator = startup.attached_accelerator()
    startup.choose_platform(None, accelerator, cache_path(""))
    if accelerator == "cpu":
        is_asked = "device_count" in os.environ.get("XLA_FLAGS", "") or os.environ.get("JAX_NUM_CPU_DEVICES")
        startup.simulate(0 if is_asked else cores)
    import jax

    if accelerator == "cpu":  # jax may have been imported before, and would look for a TPU
        jax.config.update("jax_platforms", "cpu")
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

    def dynamic_mesh_reshaping(self, new_shape: tuple[int, ...], axes: tuple[str, ...] = (), state=None):
        """Give the mesh another shape. Return `state` on it, its old arrays deleted; without a state, the mesh.

        Args:
          new_shape: one to four numbers, whose product is the number of devices.
          axes: their names; default: data, model, fsdp, context.
          state: tree of arrays. An array keeps its PartitionSpec; one without a PartitionSpec is replicated.

        Raises:
          ConfigError: the shape does not fit the devices, or an axis does not divide a dimension. Nothing is changed.
        """
        axes, count = axes or AXES[: len(new_shape)], len(self._devices)
        for axis in axes:
            one_of("axes", axis, MESH_AXES)
        if len(set(axes)) != len(new_shape) or math.prod(new_shape) != count:
            length = min(max(1, len(new_shape)), len(AXES))
            legal = {tuple(sorted(shape, reverse=True)) for shape in validation.shapes(count, length)}
            raise ConfigError(
                f"a mesh of {tuple(new_shape)} needs {math.prod(new_shape)} devices and a name for each number, but "
                f"there are {count}, named {', '.join(axes)}; use {' or '.join(map(str, sorted(legal)))} in any order"
            )
        old, self_before = self.mesh, dict(self.mesh.shape)
        self._set_mesh(dict(zip(axes, new_shape, strict=True)))
        try:
            return self.mesh if state is None else self._moved(state, old)
        except ConfigError:
            self._set_mesh(self_before)
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

    def _moved(self, state, old):
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        from parallelism.resharding import reshard

        def placed(leaf):
            known = isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding)
            return leaf if known else jax.device_put(leaf, NamedSharding(old, PartitionSpec()))

        state = jax.tree.map(placed, state)
        layouts = jax.tree.map(lambda leaf: NamedSharding(self.mesh, leaf.sharding.spec), state)
        try:
            jax.tree.map(lambda leaf, layout: layout.shard_shape(leaf.shape), state, layouts)
        except ValueError as error:
            raise ConfigError(f"state: {' '.join(str(error).split())[:300]}") from None
        return reshard(
            state, jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, layouts)
        )
