# SPDX-License-Identifier: Apache-2.0
"""The command of the Valkyrie guide that trains: train.py with recipes in YAML, by the names of KEYS in valkyrie.py."""

import os
import pathlib

from ml_collections import ConfigDict

from migration import guides, valkyrie

TPU = {"tpu.mesh_config": "TPU_MESH_CONFIG", "tpu.axis_names": "TPU_AXIS_NAMES"}


def main() -> None:
    """Run train.py with the arguments of this process; its log goes to /tmp too."""
    valkyrie.log_to_tmp()
    guides.train(arguments, recipe)


def recipe(file: str) -> ConfigDict:
    """Return the configuration of a YAML file; ConfigError if the file is wrong."""
    return valkyrie.configuration(guides.read_file(file, valkyrie.FILE), file)


def arguments(words: list[str]) -> list[str]:
    """Return the arguments of train.py; a YAML file decides on mesh and folder if nothing else does."""
    file, _ = guides.take(words, "--config")
    if file.endswith(guides.SUFFIXES):
        given = valkyrie.KEYS.read(guides.read_file(file, valkyrie.FILE), file)
        is_chosen = guides.take(words, "--topology")[0] or os.environ.get("TPU_MESH_CONFIG")
        for key in () if is_chosen else TPU.keys() & given.keys():
            value = given[key]
            os.environ[TPU[key]] = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if not guides.take(words, "--workdir")[0]:
            words = [*words, f"--workdir=runs/{pathlib.Path(file).stem}"]
    valkyrie.simulate_without_tpu()
    return words
