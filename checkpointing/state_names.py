# SPDX-License-Identifier: Apache-2.0
"""The names of a state's arrays in a checkpoint, in which the first word is a part of the state, such as params.

Other programs and older checkpoints rely on these names. If the fields of TrainState change, only `as_arrays` and
`as_state` have to follow.
"""

import dataclasses
from collections.abc import Iterable

from training.state import TrainState, named_leaves

PARAMS, AVERAGE = "params", "average"
WEIGHTS = (PARAMS, AVERAGE)  # readers of a trained model restore one of these parts
OFTEN_OFF = {AVERAGE: {}, "noise": {}}  # parts that every checkpoint names, even if they have no arrays


def as_arrays(state: TrainState | dict) -> dict:
    """Return the arrays of a state as a nested dictionary; their paths in it are their names in a checkpoint.

    The memory of a step transform is a part with the transform's name. A dictionary is returned unchanged.
    """
    if isinstance(state, dict):
        return state
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state) if field.name != "extra"}
    return fields | OFTEN_OFF | state.extra


def as_state(arrays: dict, like: TrainState | dict) -> TrainState | dict:
    """Return the state with these arrays: the inverse of `as_arrays` for a state with the parts of `like`."""
    if isinstance(like, dict):
        return arrays
    fields = {name: part for name, part in arrays.items() if name not in OFTEN_OFF | like.extra}
    return dataclasses.replace(like, **fields, extra={name: arrays[name] for name in like.extra})


def names_of(arrays: dict) -> set[str]:
    """Return the name of each array: its path, joined by dots."""
    return {name for name, _ in named_leaves(arrays)}


def eval_part(names: Iterable[str]) -> str:
    """Return the part of a checkpoint to evaluate, from the names of its arrays: AVERAGE if it has one, else PARAMS."""
    return AVERAGE if any(name.startswith(f"{AVERAGE}.") for name in names) else PARAMS


def differences(found: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """Return phrases about the arrays that a checkpoint lacks, and those that it has and that are not needed.

    A part that differs completely is named by its first word.
    """
    found, wanted = set(found), set(wanted)
    return [
        f"{verb} {name}"
        for verb, more, fewer in (("lacks", wanted, found), ("also has", found, wanted))
        for name in sorted(_shortened(more - fewer, fewer))
    ]


def _shortened(names: set[str], others: set[str]) -> set[str]:
    parts = {name.partition(".")[0] for name in others}
    return {name if (part := name.partition(".")[0]) in parts else part for name in names}
