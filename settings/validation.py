# SPDX-License-Identifier: Apache-2.0
"""Checks that a configuration is consistent, before any device is initialized or any file is opened."""

import math
from collections.abc import Iterator

from ml_collections import ConfigDict

from configs import topologies
from configs.base import BATCH_AXES, MESH_AXES, batch_shards, supports_shard_map
from configs.errors import ConfigError
from settings import (
    architecture,
    cycles,
    error_correction,
    fine_tuning,
    layouts,
    meta_learning,
    ramp,
    ranges,
    reinforcement,
    together,
)  # fmt: skip
from settings.architecture import divisible, divisors, multiples_text
from settings.keys import LENGTHS, flat
from settings.resolving import Loaded


def validate(config: ConfigDict, num_devices: int, loaded: Loaded | None = None) -> None:
    """Raise ConfigError with the key, its value, the rule and a remedy; resolve a mesh axis of -1 in place."""
    check_keys(config)
    resolve_mesh(config, num_devices, loaded)
    for step, on_mesh in layouts.on_each_mesh(config).items():
        with layouts.named(step):
            _check_mesh(on_mesh)
    if loaded:
        together.check_typed(loaded)


def _check_mesh(config: ConfigDict) -> None:
    together.check(flat(config), of_mesh=True)
    _check_batch(config)
    _check_parts(config)
    meta_learning.check_rows(config, meta_learning.microbatch_rows(ramp.of_first_stage(config)))
    _check_computation(config)


def check_keys(config: ConfigDict) -> None:
    """Raise ConfigError for errors that do not depend on the devices."""
    values = flat(config)
    ranges.check(values)
    if sum(values[key] > 0 for key in LENGTHS) != 1:
        raise ConfigError(f"exactly one of {', '.join(LENGTHS)} must be greater than 0")
    together.check(values, of_mesh=False)
    architecture.check(config)
    _check_axis_order(config.layout.axis_order)
    layouts.changes(config.layout.changes)
    fine_tuning.check(config)
    cycles.check(config)
    meta_learning.check(config)
    reinforcement.check(config)
    error_correction.check(config)
    batch, most, keys = config.batch, config.train.global_batch, config.distillation
    if batch.ramp != "none" and not 1 <= batch.first <= most:
        raise ConfigError(f"batch.first={batch.first} must lie between 1 and train.global_batch={most}, its largest")
    if keys.teacher and not keys.soft_weight + keys.hidden_weight:
        raise ConfigError("distillation.soft_weight=0 and hidden_weight=0 give the teacher no effect; raise one")


def changed(config: ConfigDict, keys: dict[str, object], num_devices: int) -> ConfigDict | None:
    """Return a copy of a configuration with other values of some dotted keys; None if it is inconsistent."""
    copy = config.copy_and_resolve_references()
    copy.update_from_flattened_dict(keys)
    try:
        validate(copy, num_devices)
    except ConfigError:
        return None
    return copy


def _check_axis_order(order: str) -> None:
    first, *others = order.split(",")
    if first != MESH_AXES[0] or sorted(others) != sorted(MESH_AXES[1:]):
        raise ConfigError(
            f"layout.axis_order={order} must be {MESH_AXES[0]} and then {', '.join(MESH_AXES[1:])} in any order, "
            f"each once and without spaces, as in {','.join(MESH_AXES)}"
        )


def resolve_mesh(config: ConfigDict, num_devices: int, loaded: Loaded | None = None) -> None:
    """Replace a -1 in config.mesh by the remaining factor of the device count.

    Raises ConfigError if the product of config.mesh, or of a mesh in layout.changes, is not the device count. `loaded`,
    the configuration with its origins, is for the message.
    """
    mesh = config.mesh
    free = [axis for axis, size in mesh.items() if size == -1]
    for axis, size in mesh.items():
        ranges.check_number(f"mesh.{axis}", size)
    if len(free) > 1:
        raise ConfigError(f"mesh.{free[0]} and mesh.{free[1]} are both -1; only one axis can take what is left")
    product = math.prod(size for size in mesh.values() if size != -1)
    sizes = " * ".join(f"{axis}={size}" for axis, size in mesh.items() if size != 1) or "with all axes 1"
    if product > num_devices or num_devices % product or (not free and product != num_devices):
        if loaded and loaded.environment_mesh and not any(f"mesh.{axis}" in loaded.typed for axis in MESH_AXES):
            raise ConfigError(_environment_misfit(loaded, num_devices))
        hints = [f"set the axes to a product of {num_devices}"]
        hints += ["set one of them to -1"] if num_devices % product == 0 else []
        hints += [] if loaded and loaded.topology else ["give --topology"]
        raise ConfigError(
            f"mesh {sizes} needs {_devices(product, multiple=bool(free))}, but there {_are(num_devices)}; "
            + ", or ".join(hints)
        )
    if free:
        mesh[free[0]] = num_devices // product
    layouts.check(config)


def _devices(count: int, *, multiple: bool) -> str:
    devices = "1 device" if count == 1 else f"{count} devices"
    return f"a multiple of {devices}" if multiple else devices


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"


def _environment_misfit(loaded: Loaded, num_devices: int) -> str:
    """Return the message that TPU_MESH_CONFIG does not fit, with a slice that it fits and a mesh for these devices."""
    sizes, topology, reasons = tuple(loaded.environment_mesh.values()), loaded.topology, []
    wanted, needed, fits = _shape_text(sizes), math.prod(sizes), _shape_text(nearest_shape(sizes, num_devices))
    if topology and topology.chips == num_devices:
        where, there = topology.name, f"{topology.name} has {num_devices} chips"
        if other := topologies.of_size(topology, needed):
            reasons.append(f"{wanted} is for a {other} ({needed} chips)")
        if needed == topology.cores_per_chip * num_devices:
            reasons.append(f"a {where} has {needed} TensorCores, but JAX shows a chip as one device")
    else:
        where, there = f"{num_devices} devices", f"there are {num_devices}"
        if needed == 2 * num_devices:
            reasons.append("a chip of v4 or v5p has 2 TensorCores, but JAX shows it as one device")
    why = "".join(f"; {reason}" for reason in reasons)
    return f"TPU_MESH_CONFIG={wanted} needs {needed} devices, {there}{why}; on {where} use {fits}"


def nearest_shape(sizes: tuple[int, ...], num_devices: int) -> tuple[int, ...]:
    """Return the mesh of `num_devices` devices that is most similar to `sizes`.

    First, as few axes as possible change between 1 and more. Then the factors of the changes are small, and changes are
    on the last axes.
    """

    def unlike(shape: tuple[int, ...]) -> tuple:
        pairs = list(zip(sizes, shape, strict=True))
        factors = [round(abs(math.log(old / new)), 6) for old, new in pairs]
        return sum((old > 1) != (new > 1) for old, new in pairs), round(sum(factors), 6), factors

    return min(shapes(num_devices, len(sizes)), key=unlike)


def shapes(num_devices: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yield every mesh of `num_devices` devices, in ascending order of the first sizes."""
    if axes == 1:
        yield (num_devices,)
        return
    for size in divisors(num_devices):
        for others in shapes(num_devices // size, axes - 1):
            yield size, *others


def _shape_text(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))


def _check_batch(config: ConfigDict) -> None:
    train, mesh, length, longest = config.train, config.mesh, config.train.sequence_length, config.model.max_length
    shards = batch_shards(mesh)
    microbatches = max(1, train.gradient_accumulation)
    if train.global_batch % (shards * microbatches):
        parts = f"{shards} shards (mesh {' * '.join(BATCH_AXES)})"
        parts += f" * {microbatches} microbatches" if microbatches > 1 else ""
        raise ConfigError(
            f"train.global_batch={train.global_batch} is not a multiple of its {parts}; "
            f"use {multiples_text(train.global_batch, shards * microbatches)}"
        )
    if length > longest:
        raise ConfigError(
            f"train.sequence_length={length} is longer than model.max_length={longest}; "
            "shorten the one or raise the other"
        )
    divisible("train.sequence_length", length, "mesh.context", mesh.context)


def _check_parts(config: ConfigDict) -> None:
    """Check the other divisions: experts over the mesh, and held-out sequences into chunks."""
    chunk, length, mesh = config.evaluation.chunk_tokens, config.train.sequence_length, config.mesh
    divisible("model.num_experts", config.model.num_experts, "mesh.expert * mesh.model", mesh.expert * mesh.model)
    if chunk and length % chunk:
        fitting = max(divisor for divisor in divisors(length) if divisor <= chunk or divisor == 1)
        raise ConfigError(
            f"evaluation.chunk_tokens={chunk} does not divide train.sequence_length={length}; use {fitting}"
        )
    if chunk % mesh.context:
        raise ConfigError(
            f"evaluation.chunk_tokens={chunk} is not a multiple of mesh.context={mesh.context}; "
            f"use {math.lcm(mesh.context, chunk)}"
        )


def _check_computation(config: ConfigDict) -> None:
    if ramp.measures_noise(config) and config.batch.fit == "none" and ramp.num_parts(config) < 2:
        raise ConfigError(
            "the noise scale compares parts of a batch, so it needs at least two: use "
            "--config.train.gradient_accumulation of at least 2 (and of batch.first at least 2 microbatches), or, "
            "without mesh.context, --config.mesh.data"
        )
    if config.train.sum_dtype != "auto" and math.prod(config.mesh.values()) > 1 and not supports_shard_map(config):
        raise ConfigError(
            f"train.sum_dtype={config.train.sum_dtype} needs mesh.context=1 and a train.sequence_length that "
            "mesh.model divides; elsewhere the compiler chooses the type: use --config.train.sum_dtype=auto"
        )
