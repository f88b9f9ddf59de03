# SPDX-License-Identifier: Apache-2.0
"""Reads a search space, and turns its entries into Optuna's distributions and parameters into changes of keys."""

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from configs.base import KEYS
from configs.errors import ConfigError, did_you_mean
from configs.space import Choice, Range, Space, Value
from files.folders import source_files
from files.paths import expanded
from settings.keys import similar_keys
from settings.loading import ROOT, run_file


def read(path: str) -> Space:
    """Return the SPACE of a Python file, which is looked for here, in the workspace and in its configs/.

    Raises:
      ConfigError: there is no such file, it fails, an entry is not a range or choice of a key, or two set one key.
    """
    typed = expanded(path)
    file = next((place for place in (typed, ROOT / typed, ROOT / "configs" / typed) if place.is_file()), None)
    if file is None or file.suffix != ".py":
        known = ", ".join(f"spaces/{place.name}" for place in source_files(ROOT / "configs" / "spaces", "*.py"))
        raise ConfigError(f"--space={path} is not a Python file with a SPACE; this workspace has {known}")
    space = run_file(file, f"--space={path}", lambda module: module.SPACE)
    if not isinstance(space, dict) or not space:
        raise ConfigError(f"--space={path}: SPACE must be a dictionary {{key: Range(...) or Choice(...)}}")
    setters = {}  # by key
    for name, entry in space.items():
        _check(f"--space={path}", name, entry)
        for key in sorted(keys_of(name, entry)):
            if key in setters:
                raise ConfigError(f"--space={path}: {key} is set by {setters[key]} and by {name}; leave one out")
            setters[key] = name
    return space


def _check(where: str, name: str, entry: object) -> None:
    if not isinstance(entry, Range | Choice):
        raise ConfigError(f"{where}: {name} is {entry!r}, which is neither a Range nor a Choice")
    if has_sets(entry) and not all(isinstance(changes, dict) for changes in entry.values.values()):
        raise ConfigError(f"{where}: {name} names values that are not sets {{key: value}}; give a list of values")
    for key in {name, *keys_of_sets(entry)}:
        if not isinstance(key, str):
            raise ConfigError(f"{where}: {key!r} is not a key, which is a text; write it as 'model.num_layers'")
    for key in keys_of(name, entry) - KEYS.keys():
        raise ConfigError(f"{where}: {key} is not a configuration key{did_you_mean(similar_keys(key, KEYS))}")


def keys_of_sets(entry: Range | Choice) -> set[str]:
    """Return the keys of a choice between sets of keys; none for other entries."""
    return {key for changes in entry.values.values() for key in changes} if has_sets(entry) else set()


def keys_of(name: str, entry: Range | Choice) -> set[str]:
    """Return the configuration keys that an entry changes: those of its sets, or the one that it is named after."""
    return keys_of_sets(entry) if has_sets(entry) else {name}


def searched_keys(space: Space) -> set[str]:
    """Return the configuration keys that the entries of a space change."""
    return {key for name, entry in space.items() for key in keys_of(name, entry)}


def has_sets(entry: Range | Choice) -> bool:
    """Return whether an entry is a choice between named sets of keys."""
    return isinstance(entry, Choice) and isinstance(entry.values, dict)


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """Return Optuna's distribution of each entry."""
    return {name: _distribution(entry) for name, entry in space.items()}


def _distribution(entry: Range | Choice) -> BaseDistribution:
    if isinstance(entry, Choice):
        return CategoricalDistribution(list(entry.values))
    if entry.is_whole:
        return IntDistribution(entry.low, entry.high, log=entry.log, step=int(entry.step or 1))
    return FloatDistribution(entry.low, entry.high, log=entry.log, step=entry.step or None)


def changes(space: Space, parameters: dict[str, Value]) -> dict[str, Value]:
    """Return the keys that a point of the space changes."""
    found = {}
    for name, value in parameters.items():
        found |= space[name].values[value] if has_sets(space[name]) else {name: value}
    return found
