# SPDX-License-Identifier: Apache-2.0
"""What the adapters of earlier systems share: tables of keys, YAML files, flags, and the start of train.py."""

import argparse
import dataclasses
import pathlib
import runpy
import sys
from collections.abc import Callable, Mapping

from ml_collections import ConfigDict

from configs import base
from configs.errors import ConfigError, did_you_mean, shown, similar
from core import command_line, ending
from files.json_reader import JsonError
from files.paths import expanded
from files.yaml_reader import parse_yaml
from settings import loading, validation
from settings.keys import convert

SUFFIXES = (".yaml", ".yml")
COMMON = {  # keys of several systems, and ours
    "model.hidden_size": "model.embed_dim", "model.intermediate_size": "model.mlp_dim",
    "model.max_seq_len": "model.max_length",
    "training.learning_rate": "optimizer.learning_rate", "training.warmup_steps": "optimizer.warmup_steps",
    "training.weight_decay": "optimizer.weight_decay", "training.max_steps": "train.steps",
    "training.log_every": "train.log_every", "training.eval_every": "train.eval_every",
    "training.save_every": "train.save_every",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys of an earlier system, dotted: `training.max_steps`. Keys of configs/base.py may be used too.

    Attributes:
      renamed: {key: our key of the same meaning}.
      own: {key: default} of keys that the adapter translates to several of ours.
      fixed: {key: (the only supported value, what is here instead)}.
      noted: {key: what is here instead, or "" where the adapter reads it}; any value is accepted.
      anywhere: keys that lose their section.
    """

    renamed: Mapping[str, str]
    own: Mapping[str, object] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    noted: Mapping[str, str] = dataclasses.field(default_factory=dict)
    anywhere: tuple[str, ...] = ()

    def dotted(self, given: Mapping, prefix: str = "") -> dict[str, object]:
        """Return {dotted key: value} of nested sections."""
        found = {}
        for key, value in given.items():
            name = str(key) if key in self.anywhere else f"{prefix}{key}"
            found |= self.dotted(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
        return found

    def read(self, given: Mapping, source: str) -> dict[str, object]:
        """Return {dotted key: value of the key's type} of nested sections; a ConfigError begins with `source`."""
        return {key: self._typed(key, value, source) for key, value in self.dotted(given).items()}

    def ours(self, values: Mapping) -> dict[str, object]:
        """Return {our key: value} of the keys that are ours, or renamed."""
        typed = {}  # {our key: the key that was given}
        for key in values:
            other = typed.setdefault(self.renamed.get(key, key), key) if key not in self.fixed else key
            if other != key and values[other] != values[key]:
                raise ConfigError(
                    f"{other}={shown(values[other])} and {key}={shown(values[key])} are one key; leave out one"
                )
        return {ours: values[key] for ours, key in typed.items() if ours in base.KEYS}

    def check(self, key: str, value: object, source: str) -> None:
        """Raise ConfigError for an unknown key, or for one whose value is not supported."""
        known = {*self.renamed, *self.own, *self.fixed, *self.noted, *base.KEYS}
        if key not in known:
            raise ConfigError(f"{source}: {shown(key)} is not a key{did_you_mean(similar(key, known))}")
        if key in self.fixed and value != self.fixed[key][0]:
            raise ConfigError(f"{source}: {key}={shown(value)} is not supported: {self.fixed[key][1]}")

    def _typed(self, key: str, value: object, source: str) -> object:
        self.check(key, value, source)
        if key in self.noted or key in self.fixed:
            return value
        default = self.own[key] if key in self.own else base.KEYS[self.renamed.get(key, key)].default
        try:
            return convert(value, type(default))  # PyYAML reads 1e-4 as a text
        except ValueError as error:
            raise ConfigError(f"{source}: {key}={shown(value)} {error}") from None


def configured(config: ConfigDict, values: Mapping, source: str) -> ConfigDict:
    """Return the configuration with these values; a ConfigError, if they are inconsistent, begins with `source`."""
    config.update_from_flattened_dict(values)
    try:
        validation.check_keys(config)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return config


def read_file(typed: str | pathlib.Path, example: str) -> dict:
    """Return the keys in a YAML file of the current folder, or of this workspace; ConfigError if there are none."""
    path = expanded(typed)
    file = next((file for file in (path, loading.ROOT / path) if file.is_file()), None)
    if file is None:
        raise ConfigError(f"--config={typed} is not a file; {example} is one")
    try:
        content = parse_yaml(file.read_bytes(), file.name)
    except (OSError, JsonError) as error:
        raise ConfigError(f"--config={typed} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config={typed} has no keys; write them as in {example}")
    return content


def take(words: list[str], flag: str) -> tuple[str, list[str]]:
    """Return the value of a flag, "" without it, and the other words; ConfigError if it has no value."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(flag, dest="value")
    try:
        found, rest = parser.parse_known_args(words)
    except argparse.ArgumentError:
        found, rest = argparse.Namespace(value=""), words
    if found.value == "":
        raise ConfigError(f"{flag} has no value; add one, or omit the flag")
    return found.value or "", rest


def train(
    arguments: Callable[[list[str]], list[str]], configuration: Callable[[Mapping, str], ConfigDict], example: str
) -> None:
    """Run train.py: `arguments` converts the typed words, and `configuration` a YAML file's content and name."""
    ending.install()
    loading.READERS |= dict.fromkeys(SUFFIXES, lambda file: configuration(read_file(file, example), str(file)))
    command_line.typed_by_user = sys.orig_argv[1:]  # also of `python -m`
    sys.argv[1:] = arguments(sys.argv[1:])
    runpy.run_module("train", run_name="__main__", alter_sys=True)
