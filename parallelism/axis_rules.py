# SPDX-License-Identifier: Apache-2.0
"""The one table from logical axes to mesh axes, and the layouts that follow from it."""

import math

from flax.traverse_util import unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from configs.base import BATCH_AXES, ConfigError

RULES = (
    # weights
    ("layers", None),
    ("vocab", "model"),
    ("embed", ("fsdp", "context", "expert")),  # whatever splits tokens but copies: all share the weights
    ("heads", "model"),
    ("kv_heads", "model"),
    ("head_dim", None),
    ("mlp", "model"),
    ("rank", None),
    ("norm", None),
    ("puzzles", None),  # a table's columns are split, so that each device has all rows
    ("constant", None),
    ("router", None),
    ("balance", None),
    ("experts", ("expert", "model")),  # an expert is not split: what splits other layers' columns holds others of them
    ("expert_embed", ("fsdp", "context")),
    ("expert_mlp", None),
    # activations; heads, kv_heads, mlp and vocab as in weights
    ("batch", BATCH_AXES),
    ("length", "context"),
    ("stream", "model"),  # the length outside attention and MLP, where each device computes by itself
    ("key_length", None),  # every query sees every key: keys and values are gathered over context
    ("act_embed", None),
    ("tokens", (*BATCH_AXES, "model")),  # batch and length together, where devices send each other tokens
    ("owners", ("expert", "model")),  # of experts, to which they send them
)

OF_A_DEVICE, IN_SHARDS = ("batch", "heads", "kv_heads", "mlp", "experts"), ("embed", "expert_embed", "vocab")


def without(mesh_axes: tuple[str, ...]) -> list[tuple]:
    """Return the rules for code whose batch is no longer split over these mesh axes."""
    rules = dict(RULES)
    left = {name: tuple(axis for axis in rules[name] if axis not in mesh_axes) for name in ("batch", "tokens")}
    return list((rules | left).items())


def on_device(*, weights_whole: bool = False) -> list[tuple]:
    """Return the rules for what one device computes: of its rows, heads, experts and MLP columns it knows no others.

    With `weights_whole` it knows no other parts of a weight either, which else lie in shards.
    """
    own = OF_A_DEVICE + (IN_SHARDS if weights_whole else ())
    return list((dict(RULES) | dict.fromkeys(own)).items())


def batch_sharding(mesh, ndim: int = 2) -> NamedSharding:
    """Return the layout of a batch array [batch, length], or of its first dimensions."""
    rules = dict(RULES)
    return NamedSharding(mesh, PartitionSpec(*(rules["batch"], rules["length"])[:ndim]))


def weight_shardings(declared: dict[tuple, tuple[tuple, tuple]], mesh) -> dict:
    """Return the NamedSharding of each weight as a nested dictionary; ConfigError where an axis does not divide one.

    `declared` is {path: (shape, axis names)}; a dimension without a name is not split.
    """
    rules, shardings = dict(RULES) | {None: None}, {}
    for path, (shape, names) in declared.items():
        for size, name in zip(shape, names, strict=True):
            _check_divides(".".join(map(str, path)), size, name, rules[name], mesh)
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
