# SPDX-License-Identifier: Apache-2.0
"""The command of VishwamAI's guide: train.py with recipes in YAML, and with --profile and --wandb as switches."""

import os
import sys

from cluster import startup
from configs import topologies
from migration import guides
from migration.vishwamai import keys

SWITCHES = {"--profile": "--profile=10:14", "--wandb": "--config.logging.wandb=true"}


def main() -> None:
    """Run train.py with the arguments of this process."""
    guides.train(arguments, lambda file: keys.recipe(guides.read_file(file, keys.FILE), file))


def arguments(typed: list[str]) -> list[str]:
    """Return the arguments of train.py; print a line to stderr for each key that has no counterpart.

    Without --config the file is keys.FILE. Without an accelerator, the slice of v4 with as many chips as the file's
    `tpu_cores` is simulated, unless a topology or TPU_MESH_CONFIG is given.
    """
    found = [SWITCHES.get(word, word) for word in typed]
    if not guides.take(found, "--config")[0]:
        found.insert(0, f"--config={keys.FILE}")
    file, _ = guides.take(found, "--config")
    if not file.endswith(guides.SUFFIXES):
        return found
    given = keys.KEYS.dotted(guides.read_file(file, keys.FILE))
    sys.stderr.writelines(keys.notes(given))
    if keys.FOLDER in given and not guides.take(found, "--workdir")[0]:
        found.append(f"--workdir={given[keys.FOLDER]}")
    slice_name = topologies.of_size(topologies.get("v4-8"), keys.cores(given, file))
    is_chosen = guides.take(found, "--topology")[0] or os.environ.get("TPU_MESH_CONFIG")
    if slice_name and not is_chosen and startup.attached_accelerator() == "cpu":
        found.append(f"--topology={slice_name}")
    return found
