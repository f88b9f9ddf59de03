# SPDX-License-Identifier: Apache-2.0
"""The command of the Valkyrie guide that trains: train.py with a YAML file, for which this file is the recipe."""

import contextlib
import inspect
import os
import pathlib
import runpy
import sys

from ml_collections import ConfigDict

from configs.errors import ConfigError, did_you_mean, shown, similar
from migration import valkyrie, yaml_file
from settings.keys import flat, parse_typed
from settings.loading import ROOT

RECIPE, FILE = "migration/valkyrie_yaml.py", "VALKYRIE_YAML"  # the variable by which `main` names the file
TPU = {"mesh_config": "TPU_MESH_CONFIG", "axis_names": "TPU_AXIS_NAMES"}
TRAINING = {
    "batch_size": "train.global_batch", "gradient_accumulation_steps": "train.gradient_accumulation",
    "max_steps": "train.steps", "learning_rate": "optimizer.learning_rate", "warmup_steps": "optimizer.warmup_steps",
    "weight_decay": "optimizer.weight_decay", "log_every": "train.log_every", "eval_every": "train.eval_every",
    "save_every": "train.save_every",
}  # fmt: skip
MODEL = {name: of.default for name, of in inspect.signature(valkyrie.ValkyrieConfig).parameters.items()}


def main() -> None:
    """Run train.py; a YAML file after --config decides on the recipe, and on mesh and folder if nothing else does."""
    words = sys.argv[1:]
    if "--config" in words[:-1]:
        at = words.index("--config")
        words[at : at + 2] = [f"--config={words[at + 1]}"]
    given = dict(word.partition("=")[::2] for word in words)
    file = given.get("--config", "")
    if file.endswith((".yaml", ".yml")):
        at = words.index(f"--config={file}")
        words[at], os.environ[FILE] = f"--config={RECIPE}", file
        words += [] if "--workdir" in given else [f"--workdir=runs/{pathlib.Path(file).stem}"]
        if "--topology" not in given and not os.environ.get("TPU_MESH_CONFIG"):
            set_mesh(file)
    valkyrie.simulate_without_tpu()
    valkyrie.log_to_tmp()
    sys.argv[1:] = words
    runpy.run_module("train", run_name="__main__", alter_sys=True)


def get_config() -> ConfigDict:
    """Return the configuration of the YAML file; ConfigError if the file is wrong."""
    file = os.environ.get(FILE, "configs/tpu_v4_32.yaml")
    content = read(file)
    for name, value in content["model"].items():
        kinds = {float: (float, int), type(None): (type(value),)}.get(type(MODEL[name]), (type(MODEL[name]),))
        if type(value) not in kinds:
            raise ConfigError(f"{file}: model.{name}={shown(value)} is not like {MODEL[name]!r}")
    config = valkyrie.ValkyrieConfig(**content["model"])
    typed = {TRAINING[name]: str(value) for name, value in content["training"].items()}
    try:
        config.update_from_flattened_dict(parse_typed(typed, flat(config)))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    return config


def set_mesh(file: str) -> None:
    """Set the variables of the mesh to those of a YAML file."""
    with contextlib.suppress(ConfigError):  # which `get_config` reports
        for name, value in read(file)["tpu"].items():
            os.environ[TPU[name]] = ",".join(map(str, value)) if isinstance(value, list) else str(value)


def read(file: str) -> dict[str, dict]:
    """Return {section: {name: value}} of a YAML file; ConfigError for one that is not there, or an unknown name."""
    known = {"model": MODEL, "tpu": TPU, "training": TRAINING}
    path = next((path for path in (pathlib.Path(file), ROOT / file) if path.is_file()), None)
    if path is None:
        raise ConfigError(f"--config={file} is not a file; configs/tpu_v4_32.yaml is one")
    content = yaml_file.read(path, f"--config={file}")
    content = {section: {} for section in known} | (content if isinstance(content, dict) else {file: content})
    for section, names in content.items():
        if section not in known or not isinstance(names, dict):
            raise ConfigError(f"{file}: {shown(section)} is not one of the sections {', '.join(known)}, with names")
        for name in names.keys() - known[section].keys():
            near = did_you_mean(similar(shown(name), known[section])) or f"; all: {', '.join(known[section])}"
            raise ConfigError(f"{file}: {section}.{shown(name)} is unknown{near}")
    return content
