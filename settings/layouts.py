# SPDX-License-Identifier: Apache-2.0
"""The mesh of each step: `config.mesh`, and after the steps in `layout.changes` the meshes given there."""

import contextlib
import functools
import itertools
import math
import re

from ml_collections import ConfigDict

from configs.base import MESH_AXES
from configs.errors import ConfigError, shown
from settings.resolving import mesh_sizes

EXAMPLE = "100: data=4,fsdp=2; 200: data=1,fsdp=8"


def mesh_after(config: ConfigDict, step: int) -> tuple[int, ...]:
    """Return the size of each of MESH_AXES for the steps after `step`, until the next change."""
    return next(sizes for change, sizes in reversed(meshes(config)) if change <= step)


def stage_end(config: ConfigDict, step: int) -> int:
    """Return the last step on the same mesh as the next step after `step`."""
    return min(next((change for change, _ in meshes(config) if change > step), math.inf), config.train.steps)


def on_each_mesh(config: ConfigDict) -> dict[int, ConfigDict]:
    """Return {step: copy of the configuration for only the mesh that is used after it}; the first step is 0."""
    return {step: on_mesh(config, sizes) for step, sizes in meshes(config)}


@contextlib.contextmanager
def named(step: int):
    """Add the step of the mesh change to a ConfigError of the block; for step 0 the error stays as it is."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"layout.changes, after step {step}: {error}" if step else str(error)) from None


def on_mesh(config: ConfigDict, sizes: tuple[int, ...]) -> ConfigDict:
    """Return a copy with a single mesh, with these sizes of MESH_AXES."""
    copy = config.copy_and_resolve_references()
    copy.mesh.update(dict(zip(MESH_AXES, sizes, strict=True)))
    copy.layout.changes = ""
    return copy


def text(sizes: tuple[int, ...]) -> str:
    """Return a mesh in words, without the axes of size 1."""
    return " * ".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, sizes, strict=True) if size > 1) or "1 device"


def check(config: ConfigDict) -> None:
    """Raise ConfigError if a mesh in `layout.changes` has another number of devices than the resolved `config.mesh`."""
    num_devices = math.prod(config.mesh.values())
    for step, sizes in changes(config.layout.changes):
        if math.prod(sizes) != num_devices:
            raise ConfigError(
                f"layout.changes, after step {step}: {text(sizes)} is {math.prod(sizes)} devices, there are "
                f"{num_devices}; use a product of {num_devices}, axes that are not named being 1"
            )


def meshes(config: ConfigDict) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return (step after which it is used, sizes of MESH_AXES) of each mesh of a run, in order of steps."""
    return (0, tuple(config.mesh[axis] for axis in MESH_AXES)), *changes(config.layout.changes)


@functools.cache
def changes(said: str) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return (step, sizes of MESH_AXES after it) of each change in `layout.changes`.

    Raises ConfigError if the text is not in the format of EXAMPLE; the message names the part and a remedy.
    """
    found = tuple(_change(part.strip()) for part in said.split(";") if part.strip())
    for (before, _), (step, _) in itertools.pairwise(found):
        if step <= before:
            raise ConfigError(
                f"layout.changes={shown(said)}: step {step} comes after step {before}; write them ascending"
            )
    return found


def _change(said: str) -> tuple[int, tuple[int, ...]]:
    step, _, axes = said.partition(":")
    pairs = [[word.strip() for word in pair.split("=")] for pair in axes.split(",")]
    if not re.fullmatch(r"0*[1-9][0-9]{0,9}", step.strip()) or any(len(pair) != 2 for pair in pairs):
        raise ConfigError(f"layout.changes: {shown(said)!r} is not STEP: AXIS=DEVICES,..., as in {EXAMPLE!r}")
    names, numbers = zip(*pairs, strict=True)
    sizes = mesh_sizes(names, numbers, f"layout.changes: {shown(said)!r}")
    return int(step.strip().lstrip("0")), tuple(sizes.get(axis, 1) for axis in MESH_AXES)
