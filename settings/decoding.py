# SPDX-License-Identifier: Apache-2.0
"""The configuration that decodes with the weights of a run."""

import math

from ml_collections import ConfigDict

from configs.base import MESH_AXES, batch_shards
from configs.errors import ConfigError
from settings import together


def dropless(config: ConfigDict) -> ConfigDict:
    """Return a copy whose experts drop no token, so that a row does not depend on the others of its batch."""
    config = config.copy_and_resolve_references()
    config.model.expert_capacity = 0.0
    return config


def for_decoding(config: ConfigDict, num_devices: int, *, keep_mesh: bool = False) -> ConfigDict:
    """Return a copy of a configuration for decoding on `num_devices` devices.

    A decoded token reads all weights and the whole cache once, so both are sharded over as many devices as their
    dimensions and the run's objective allow, along heads. The rows of a batch are sharded over the other devices.
    Layers are not scanned: a scan would copy the cache of each layer for each token. Experts drop no token.

    The configuration is resolved; with `keep_mesh` its mesh stays. Raises ConfigError if the mesh shards the length.
    """
    config, model = dropless(config), config.model
    if not keep_mesh:
        sizes = [model.num_heads, model.num_kv_heads, model.vocab_size, model.num_experts or model.mlp_dim]
        config.mesh.update(dict.fromkeys(MESH_AXES, 1))
        shards_heads = together.accepts(config, "mesh.model", num_devices)
        config.mesh.model = math.gcd(num_devices, *sizes) if shards_heads else 1
        config.mesh.data = num_devices // config.mesh.model
    if config.mesh.context > 1:
        raise ConfigError(
            f"mesh.context={config.mesh.context} shards the length, but tokens are decoded one by one; use "
            "--config.mesh.model or --config.mesh.data"
        )
    config.model.layer_loop, config.layout.changes = "unroll", ""
    # No step is trained, but the rules ask for a batch that the mesh and grpo.group_size divide, and limit its rows.
    batch = math.lcm(config.train.global_batch, batch_shards(config.mesh))
    config.train.update(global_batch=batch, gradient_accumulation=1, sum_dtype="auto")
    return config
