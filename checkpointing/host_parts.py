# SPDX-License-Identifier: Apache-2.0
"""The parts of a checkpoint that hosts without shared storage keep, and how they are joined; without jax.

A part is a checkpoint's folder like any other (checkpointing/folder_store.py), with the chunks that one process holds.
Its `part.json` says whose it is and who holds the others. A joined checkpoint has the chunks of all parts and no
`part.json`, so that everything can read it.
"""

import itertools
import math
import os
import pathlib
import shutil
from collections.abc import Sequence

from checkpointing import manifest
from checkpointing.folder import STEP, UNFINISHED
from files.json_reader import Object, read_json

PART, STATE, LAYOUT = "part.json", "state", ".zarray"
CHECKPOINTS = "checkpoints"
NOT_COPIED = (CHECKPOINTS, "lock")  # of a run's folder: checkpoints are joined, and a lock is of a host
REMEDY = "`pod.py backup` joins the parts of all hosts into a checkpoint that can be restored anywhere"


class Part(Object):
    """Whose part of a checkpoint a folder is.

    Keys:
      save: digest of all parts; those of one save have the same.
      process: number of the process that wrote this part.
      holders: names of all processes that wrote one, in their order.
    """

    save: str
    process: int
    holders: list[str]


class Layout(Object):
    """The fields of an array's .zarray that are read here."""

    shape: list[int]
    chunks: list[int]


class Incomplete(ValueError):
    """The parts of a checkpoint cannot be joined; the message says why."""


def read(checkpoint: pathlib.Path) -> Part | None:
    """Return whose part a checkpoint's folder is; None if it is complete. Raises JsonError if part.json is damaged."""
    return read_json(checkpoint / PART, Part) if (checkpoint / PART).exists() else None


def chunk_files(checkpoint: pathlib.Path, layout: str, index: Sequence[slice] | None = None) -> list[str]:
    """Return the files of an array, or of a part of it, below a checkpoint's folder.

    `layout` is the file of its layout there, state/NAME/.zarray. `index` has a slice for each dimension; None: all.
    """
    found = read_json(checkpoint / layout, Layout)
    spans = [part.indices(size)[:2] for part, size in zip(index, found["shape"], strict=True)] if index else [
        (0, size) for size in found["shape"]
    ]  # fmt: skip
    ranges = [
        range(first // size, math.ceil(last / size)) for (first, last), size in zip(spans, found["chunks"], strict=True)
    ]
    return [layout.removesuffix(LAYOUT) + (".".join(map(str, at)) or "0") for at in itertools.product(*ranges)]


def join(folders: Sequence[pathlib.Path], target: pathlib.Path) -> tuple[list[int], list[str]]:
    """Move the run's folders of all hosts into one, `target`, with joined checkpoints; they are on one file system.

    Other files come from the host of process 0, and only those that it lacks from others, such as their logs.

    Returns the steps that were joined, and a line for each checkpoint that was left out.
    """
    found = [path for folder in folders for path in (folder / CHECKPOINTS).glob("*")]
    steps = {int(path.name) for path in found if STEP.fullmatch(path.name) and path.is_dir()}
    joined, left_out = [], []
    (target / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    by_process = list(folders)
    for step in sorted(steps):
        parts = [folder / CHECKPOINTS / str(step) for folder in folders]
        try:
            ordered = _in_order([part for part in parts if part.is_dir()])
            _join_one(ordered, step, target / CHECKPOINTS)
        except ValueError as error:
            left_out.append(f"checkpoint {step} is left out: {error}")
            continue
        joined.append(step)
        by_process = list(dict.fromkeys([*(part.parent.parent for part in ordered), *folders]))
    _move_other_files(by_process, target)
    return joined, left_out


def _in_order(found: list[pathlib.Path]) -> list[pathlib.Path]:
    """Return the parts of a checkpoint in order of their processes; Incomplete if there is a problem."""
    for folder in found:
        if problems := manifest.problems(folder):
            raise Incomplete(f"{folder.parent.parent.name} has a damaged part, {problems[0]}")
    parts = [read(folder) for folder in found]
    if whole := [folder for folder, part in zip(found, parts, strict=True) if part is None]:
        return whole[:1]
    if len({part["save"] for part in parts}) > 1:
        raise Incomplete("the hosts have parts of different saves")
    there = {part["process"]: folder for part, folder in zip(parts, found, strict=True)}
    if gone := [name for number, name in enumerate(parts[0]["holders"]) if number not in there]:
        raise Incomplete(f"no host has the part of {', '.join(gone)}")
    return [there[number] for number in sorted(there)]


def _join_one(parts: list[pathlib.Path], step: int, checkpoints: pathlib.Path) -> None:
    """Move the files of the parts to a new checkpoint; of files with equal names, the first is taken."""
    landing, files, owners = checkpoints / f"{step}{UNFINISHED}", {}, {}
    for part in reversed(parts):
        found = manifest.read(part)["files"]
        files |= found
        owners |= dict.fromkeys(found, part)
    files.pop(PART, None)
    for name in [name for name in files if name.endswith(f"/{LAYOUT}")]:
        if lost := [chunk for chunk in chunk_files(owners[name], name) if chunk not in files]:
            raise Incomplete(f"no part has {lost[0]}")
    shutil.rmtree(landing, ignore_errors=True)
    for name in files:
        (landing / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(owners[name] / name, landing / name)
    manifest.write(landing, step, files)
    earlier = checkpoints / f"erased-{step}{UNFINISHED}"  # of an earlier backup
    shutil.rmtree(earlier, ignore_errors=True)
    if (checkpoints / str(step)).exists():
        (checkpoints / str(step)).rename(earlier)
    landing.rename(checkpoints / str(step))
    shutil.rmtree(earlier, ignore_errors=True)


def _move_other_files(folders: list[pathlib.Path], target: pathlib.Path) -> None:
    moved = set()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.is_file() and name.parts[0] not in NOT_COPIED and name not in moved:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target / name)
                moved.add(name)
