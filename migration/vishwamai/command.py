# SPDX-License-Identifier: Apache-2.0
"""The command of VishwamAI's guide: train.py with recipes in YAML, and with --profile and --wandb as switches."""

import itertools
import os
import pathlib
import runpy
import sys

from core import interpreter

try:
    from cluster import startup
    from configs import topologies
    from configs.errors import ConfigError
    from migration.vishwamai import keys
    from settings import loading
except ModuleNotFoundError as missing:
    interpreter.restart(missing)

DEFAULT = "configs/tpu_optimized_config.yaml"
SWITCHES = {"--profile": "--profile=10:14", "--wandb": "--config.logging.wandb=true"}


def main() -> None:
    """Run train.py with the arguments of this process."""
    loading.READERS |= dict.fromkeys(keys.SUFFIXES, lambda file: keys.recipe(keys.read_yaml(file), str(file)))
    try:
        sys.argv[1:] = arguments(sys.argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    runpy.run_module("train", run_name="__main__", alter_sys=True)


def arguments(typed: list[str]) -> list[str]:
    """Return the arguments of train.py; print a line to stderr for each key that has no counterpart.

    Without --config the file is DEFAULT. Without an accelerator, the slice of v4 with as many chips as the file's
    `tpu_cores` is simulated, unless a topology or TPU_MESH_CONFIG is given.
    """
    found = [SWITCHES.get(word, word) for word in typed]
    if not _value(found, "config"):
        found.insert(0, f"--config={DEFAULT}")
    file, folder = _value(found, "config"), loading.ROOT
    path = next((path for path in (pathlib.Path(file), folder / file) if path.is_file()), None)
    if path is None or path.suffix not in keys.SUFFIXES:
        return found
    given = keys.dotted(keys.read_yaml(path))
    sys.stderr.writelines(keys.notes(given))
    if keys.FOLDER in given and not _value(found, "workdir"):
        found.append(f"--workdir={given[keys.FOLDER]}")
    slice_name = topologies.of_size(topologies.get("v4-8"), keys.cores(given, file))
    is_chosen = _value(found, "topology") or os.environ.get("TPU_MESH_CONFIG")
    if slice_name and not is_chosen and startup.attached_accelerator() == "cpu":
        found.append(f"--topology={slice_name}")
    return found


def _value(words: list[str], flag: str) -> str:
    """Return the value of a flag, written --flag=value or --flag value; "" without it."""
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name == flag:
            return value if equals else following
    return ""
