# SPDX-License-Identifier: Apache-2.0
"""Applies the mesh of a topology, the mesh of the environment and typed keys to a configuration."""

import dataclasses
import math
import pathlib
import re
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from configs import topologies
from configs.base import KEYS, MESH_AXES
from configs.errors import ConfigError, did_you_mean, shown, similar
from settings.keys import flat, parse_typed

EXPERT_CHIPS = 8  # largest mesh.expert of a preset; an all-to-all over more chips takes more hops
WHOLE_EXPERTS_BYTES = 2**28  # of a layer's experts in bfloat16; up to this size they are always all-gathered
LARGEST_AXIS = KEYS["mesh.data"].largest  # devices along an axis of a mesh
EARLIER_AXES = ("data", "model", "fsdp")  # for three numbers in TPU_MESH_CONFIG, as in Torus' predecessor


@dataclasses.dataclass
class Loaded:
    """A configuration and its history.

    Attributes:
      recipe, path: name and path of the recipe, or of the run and its stored configuration.
      typed: values of the keys that were typed, and of the alternatives that they clear.
      typed_keys: the keys that were typed.
      origins: for each dotted key that differs from configs/base.py, the source that set it last.
      environment_mesh: the mesh of TPU_MESH_CONFIG, {axis: devices} in its order; {} if it is not set.
      origin: content for the run's run.json.
      notes: lines to show to the user.
      of_run: whether the values are those of a run.
    """

    config: ConfigDict
    recipe: str
    path: str
    topology: topologies.Topology | None
    typed: dict[str, object]
    typed_keys: tuple[str, ...]
    origins: dict[str, str]
    environment_mesh: dict[str, int] = dataclasses.field(default_factory=dict)
    origin: dict[str, object] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    of_run: bool = False

    def as_typed(self) -> dict[str, object]:
        """Return the values of the keys that were typed, without the alternatives that they clear."""
        return {key: self.typed[key] for key in self.typed_keys}


def resolve(
    config: ConfigDict,
    origins: dict[str, str],
    name: str,
    path: pathlib.Path | str,
    topology_name: str,
    overrides: dict[str, str],
    environment: Mapping[str, str],
) -> Loaded:
    """Apply a topology, then the environment, then typed keys to a configuration; later ones take precedence.

    Args:
      config: changed in place.
      origins: the source of each key that differs from configs/base.py; changed in place.
      name, path: of the recipe, or of the run and its stored configuration.
      topology_name: a preset of configs/topologies.py, or "" for the attached devices.
      overrides: text as typed, by dotted key.
      environment: variables; TPU_MESH_CONFIG and TPU_AXIS_NAMES are read.

    Raises:
      ConfigError: a topology or key is unknown, or a value has the wrong type.
    """
    topology = topologies.get(topology_name) if topology_name else None
    mesh, typed = environment_mesh(environment), parse_typed(overrides, flat(config))
    preset = _with_experts(topology, flat(config) | typed) if topology else {}
    for axes, origin in ((preset, f"--topology={topology_name}"), (mesh, "TPU_MESH_CONFIG")):
        if axes:
            config.mesh.update({axis: axes.get(axis, 1) for axis in MESH_AXES})
            origins |= {f"mesh.{axis}": origin for axis in MESH_AXES}
    if mesh:
        config.layout.axis_order = ",".join(dict.fromkeys(("dcn_data", *mesh, *MESH_AXES)))
        origins["layout.axis_order"] = "TPU_MESH_CONFIG"
    before = flat(config)
    config.update_from_flattened_dict(typed)
    after = flat(config)
    stored = {key: config[key.partition(".")[0]][key.partition(".")[2]] for key in typed}
    if lost := [key for key, value in typed.items() if repr(stored[key]) != repr(value)]:  # linked by the recipe
        raise ConfigError(
            f"--config.{lost[0]}={shown(typed[lost[0]])} is lost, since {path} links it by get_ref to another key that "
            "is set too; leave out one of them"
        )
    linked = [key for key in after if after[key] != before[key]]
    origins |= dict.fromkeys((*linked, *typed), "command line")
    return Loaded(config, name, str(path), topology, typed, tuple(overrides), origins, mesh)


def _with_experts(topology: topologies.Topology, values: dict[str, object]) -> dict[str, int]:
    """Return a preset's mesh; a part of fsdp becomes mesh.expert if products cannot hide an all-gather of the experts.

    The all-gather of a layer's experts takes their bytes / (2 * link bandwidth). Their products take as many FLOPs for
    each token of an expert, at half of the chip's peak. So the ratio depends on the tokens of an expert alone.
    """
    mesh, experts = topology.mesh, values["model.num_experts"]
    size = 2 * 3 * experts * values["model.embed_dim"] * values["model.mlp_dim"]
    if size <= WHOLE_EXPERTS_BYTES or topology.accelerator == "cpu":
        return mesh
    tokens = values["train.global_batch"] * values["train.sequence_length"] / topology.chips
    of_expert = tokens * values["model.experts_per_token"] / experts
    hidden = of_expert >= topology.peak_flops / (4 * topology.link_bandwidth)
    expert = 1 if hidden else math.gcd(experts, mesh["fsdp"], EXPERT_CHIPS)
    return mesh | {"fsdp": mesh["fsdp"] // expert, "expert": expert}


def environment_mesh(environment: Mapping[str, str]) -> dict[str, int]:
    """Return {axis: devices} from TPU_MESH_CONFIG="4,4,2" and TPU_AXIS_NAMES="data,model,fsdp", in this order.

    Returns {} if TPU_MESH_CONFIG is not set. Three numbers without names are the sizes of EARLIER_AXES. Raises
    ConfigError if a size is not an integer greater than 0, or if the names are not one mesh axis for each size.
    """
    sizes, names = (environment.get(name, "").strip() for name in ("TPU_MESH_CONFIG", "TPU_AXIS_NAMES"))
    if not sizes and names:
        raise ConfigError(
            f"TPU_AXIS_NAMES={shown(names)} without TPU_MESH_CONFIG, a number of devices for each; set both"
        )
    if not sizes:
        return {}
    numbers = [part.strip() for part in sizes.split(",")]
    if not names and len(numbers) != len(EARLIER_AXES) and all(number.isdigit() for number in numbers):
        raise ConfigError(
            f"TPU_MESH_CONFIG={shown(sizes)} needs TPU_AXIS_NAMES, a name for each number, of {', '.join(MESH_AXES)}; "
            f"only three numbers go without, as {','.join(EARLIER_AXES)}"
        )
    axes = [name.strip() for name in names.split(",")] if names else EARLIER_AXES
    said = f"TPU_MESH_CONFIG={shown(sizes)}" + (f" TPU_AXIS_NAMES={shown(names)}" if names else "")
    if "dcn_data" in axes[1:]:
        raise ConfigError(f"{said}: dcn_data, the network between slices, changes slowest; name it first")
    return mesh_sizes(axes, numbers, said)


def mesh_sizes(axes: Sequence[str], numbers: Sequence[str], said: str) -> dict[str, int]:
    """Return {axis: devices} from text; ConfigError if it is not a valid mesh. `said` begins the message."""
    sizes = [int(number) if re.fullmatch("[0-9]{1,20}", number) else 0 for number in numbers]
    wrong = [shown(number) for number, size in zip(numbers, sizes, strict=True) if not 1 <= size <= LARGEST_AXIS]
    unknown = [axis for axis in axes if axis not in MESH_AXES]
    if wrong:
        limit = f", and at most {LARGEST_AXIS:,}" if wrong[0].isdigit() else ""
        raise ConfigError(f"{said}: {wrong[0]!r} is not a whole number greater than 0{limit}, as in 4,4,2")
    if unknown:
        name = shown(unknown[0])
        near = did_you_mean(similar(name, MESH_AXES))
        raise ConfigError(f"{said}: {name!r} is not a mesh axis{near} (all: {', '.join(MESH_AXES)})")
    if len(set(axes)) < len(axes):
        raise ConfigError(f"{said}: {max(axes, key=axes.count)} is named more than once; name each axis once")
    if len(axes) != len(numbers):
        raise ConfigError(f"{said}: {len(numbers)} numbers, but {len(axes)} names; give a name for each number")
    return dict(zip(axes, sizes, strict=True))
