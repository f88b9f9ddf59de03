# SPDX-License-Identifier: Apache-2.0
"""The one table from logical axes to mesh axes, and the layouts that follow from it."""

import math

from flax.traverse_util import unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from configs.base import BATCH_AXES
from configs.errors import ConfigError

RULES = (
    # weights
    ("layers", None),
    ("vocab", "model"),
    ("embed", ("fsdp", "context", "expert")),  # all axes that shard tokens, except the data-parallel ones
    ("heads", "model"),
    ("kv_heads", "model"),
    ("head_dim", None),
    ("mlp", "model"),
    ("rank", None),
    ("norm", None),
    ("cells", None),  # the positions that a recursive model mixes by an MLP
    ("puzzles", None),  # a table's columns are sharded, so each device has all rows
    ("constant", None),
    ("router", None),
    ("balance", None),
    ("experts", ("expert", "model")),  # each expert is on one device; `model` shards the experts, not their columns
    ("expert_embed", ("fsdp", "context")),
    ("expert_mlp", None),
    ("expert_hidden", ("fsdp", "context")),
    ("expert_out", None),
    # activations; heads, kv_heads, mlp and vocab as in weights
    ("batch", BATCH_AXES),
    ("length", "context"),
    ("stream", "model"),  # the length of the residual stream inside a shard_map: sequence parallelism
    ("key_length", None),  # every query sees every key: keys and values are all-gathered over context
    ("act_embed", None),
    ("tokens", (*BATCH_AXES, "model")),  # batch and length together, for the all-to-all of a mixture of experts
    ("owners", ("expert", "model")),  # the devices that hold the experts
)

# Dimensions that are local to a device inside a shard_map, and dimensions that shard weights.
LOCAL = ("batch", "heads", "kv_heads", "mlp", "experts")
SHARDED_PARAM = ("embed", "expert_embed", "expert_hidden", "vocab")


def rules_without(mesh_axes: tuple[str, ...]) -> list[tuple]:
    """Return the rules for code whose batch is no longer sharded over these mesh axes."""
    rules = dict(RULES)
    left = {name: tuple(axis for axis in rules[name] if axis not in mesh_axes) for name in ("batch", "tokens")}
    return list((rules | left).items())


def shard_map_rules(*, gathered_params: bool = False) -> list[tuple]:
    """Return the rules inside a shard_map, where rows, heads, experts and MLP columns are local to a device.

    With `gathered_params` all weights are gathered already, and no dimension of a weight is sharded.
    """
    own = LOCAL + (SHARDED_PARAM if gathered_params else ())
    return list((dict(RULES) | dict.fromkeys(own)).items())


def batch_sharding(mesh, ndim: int = 2) -> NamedSharding:
    """Return the sharding of a batch array [batch, length], or of its first dimensions."""
    rules = dict(RULES)
    return NamedSharding(mesh, PartitionSpec(*(rules["batch"], rules["length"])[:ndim]))


def weight_shardings(declared: dict[tuple, tuple[tuple, tuple]], mesh) -> dict:
    """Return the NamedSharding of each weight as a nested dictionary.

    `declared` is {path: (shape, axis names)}; a dimension without a name is not sharded.

    Raises:
      ConfigError: a mesh axis does not divide a dimension.
      ValueError: a name is not in RULES, or a dimension has none.
    """
    rules, shardings = dict(RULES) | {None: None}, {}
    for path, (shape, names) in declared.items():
        parameter = ".".join(map(str, path))
        if len(names) != len(shape) or not rules.keys() >= set(names):
            raise ValueError(
                f"the parameter {parameter} of shape {shape} has the axis names {names}; give one name of RULES in "
                "parallelism/axis_rules.py, or None, for each dimension"
            )
        for size, name in zip(shape, names, strict=True):
            _check_divides(parameter, size, name, rules[name], mesh)
        shardings[path] = NamedSharding(mesh, PartitionSpec(*[rules[name] for name in names]))
    return unflatten_dict(shardings)


def _check_divides(parameter: str, size: int, name: str, axes, mesh) -> None:
    axes = (axes,) if isinstance(axes, str) else axes or ()
    axes = [axis for axis in axes if mesh.shape[axis] > 1]
    product = math.prod(mesh.shape[axis] for axis in axes)
    if size % product:
        raise ConfigError(
            f"{parameter} has {size} in its dimension {name!r}, which mesh.{'*'.join(axes)}={product} does not divide; "
            f"change the dimension to a multiple of {product}, or the mesh axis to a divisor of {size}"
        )
