# SPDX-License-Identifier: Apache-2.0
"""What the adapters of earlier systems share: their keys in tables, YAML files, flags, devices, and train.py."""

import argparse
import dataclasses
import os
import pathlib
import runpy
import sys
from collections.abc import Callable, Mapping

import yaml
from ml_collections import ConfigDict

from cluster import startup
from configs import base
from configs.errors import ConfigError, did_you_mean, shown, similar
from input_pipeline.cache import cache_path
from settings import loading, validation
from settings.keys import parse_value

SUFFIXES = (".yaml", ".yml")
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
COMMON = {  # keys of several systems, and ours
    "model.hidden_size": "model.embed_dim", "model.intermediate_size": "model.mlp_dim",
    "training.learning_rate": "optimizer.learning_rate", "training.warmup_steps": "optimizer.warmup_steps",
    "training.weight_decay": "optimizer.weight_decay", "training.max_steps": "train.steps",
    "training.log_every": "train.log_every", "training.eval_every": "train.eval_every",
    "training.save_every": "train.save_every",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys of an earlier system, dotted: `training.max_steps`. Those of configs/base.py may be used beside them.

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
        """Return {dotted key: value of the key's type}; `source` begins error messages.

        Raises:
          ConfigError: a key is unknown, or a value is not supported or of another type.
        """
        return {key: self._typed(key, value, source) for key, value in self.dotted(given).items()}

    def ours(self, values: Mapping) -> dict[str, object]:
        """Return {our key: value} of the keys that are ours, or renamed."""
        named = {self.renamed.get(key, key): value for key, value in values.items() if key not in self.fixed}
        return {key: value for key, value in named.items() if key in base.KEYS}

    def _typed(self, key: str, value: object, source: str) -> object:
        known = {*self.renamed, *self.own, *self.fixed, *self.noted, *base.KEYS}
        if key not in known:
            raise ConfigError(f"{source}: {shown(key)} is not a key{did_you_mean(nearest(key, known))}")
        if key in self.noted:
            return value
        if key in self.fixed:
            only, instead = self.fixed[key]
            if value != only:
                raise ConfigError(f"{source}: {key}={shown(value)} is not supported: {instead}")
            return value
        default = self.own[key] if key in self.own else base.KEYS[self.renamed.get(key, key)].default
        try:
            if value is None or isinstance(value, list):
                raise ConfigError("")
            return parse_value(key, str(value), {key: default})  # PyYAML reads 1e-4 as a text
        except ConfigError:
            raise ConfigError(f"{source}: {key}={shown(value)} is not {KINDS[type(default)]}") from None


def nearest(key: str, known) -> list[str]:
    """Return the key that is most similar to an unknown one, or whose last part is; [] if none is."""
    leaves = {name.rpartition(".")[2]: name for name in known}
    return similar(key, known) or [leaves[name] for name in similar(key.rpartition(".")[2], leaves)]


def configured(config: ConfigDict, values: Mapping, source: str) -> ConfigDict:
    """Return the configuration with these values; ConfigError, begun by `source`, if they are inconsistent."""
    config.update_from_flattened_dict(values)
    try:
        validation.check_keys(config)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return config


def read_file(typed: str, example: str) -> dict:
    """Return the content of a YAML file, in the current folder or in this workspace.

    Raises:
      ConfigError: it cannot be read, is no mapping, or has aliases, by which a short file can stand for a huge one.
    """
    path, folder = pathlib.Path(typed).expanduser(), loading.ROOT
    file = next((file for file in (path, folder / path) if file.is_file()), None)
    if file is None:
        raise ConfigError(f"--config={typed} is not a file; {example} is one")
    try:
        text = file.read_text()
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ConfigError(f"--config={typed} has a YAML alias, which is not read; write the value out")
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config={typed} cannot be read: {' '.join(str(error).split())[:200]}") from None
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


def choose_platform() -> str:
    """Choose the platform of jax, also where it was imported before; return the accelerator, "cpu" without one."""
    accelerator = startup.attached_accelerator()
    startup.choose_platform(None, accelerator, cache_path(""))
    if "jax" in sys.modules:  # it read the variables when it was imported, as optax does
        sys.modules["jax"].config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or None)
        sys.modules["jax"].config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    return accelerator


def train(arguments: Callable[[list[str]], list[str]], recipe: Callable[[str], ConfigDict]) -> None:
    """Run train.py with `arguments` of the typed words; `recipe` reads YAML files. Exit with 2 for a wrong word."""
    loading.READERS |= dict.fromkeys(SUFFIXES, lambda file: recipe(str(file)))
    try:
        sys.argv[1:] = arguments(sys.argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    runpy.run_module("train", run_name="__main__", alter_sys=True)
