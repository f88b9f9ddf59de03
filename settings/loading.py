# SPDX-License-Identifier: Apache-2.0
"""Builds one configuration from a recipe file, a topology, the environment and typed overrides; records origins."""

import contextlib
import copy
import importlib.machinery
import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import RequiredValueError

from configs import base
from configs.errors import ConfigError, did_you_mean, similar
from files.folders import source_files
from files.paths import expanded
from settings import stored_config
from settings.keys import flat, refuse_passwords
from settings.resolving import Loaded, resolve

WRONG_TYPE = re.compile(  # as ml_collections says it
    r"override field '(\w+)' .*?\. (.*) is of original type <class '([\w.]+)'>.*<class '([\w.]+)'>"
)
ROOT = pathlib.Path(__file__).resolve().parent.parent
# Recipes in other formats than Python, by the suffix of their files: a function of the path returns the configuration.
READERS: dict[str, Callable[[pathlib.Path], ConfigDict]] = {}


def load(
    recipe_path: str | os.PathLike,
    topology_name: str,
    overrides: dict[str, str],
    environment: Mapping[str, str] = types.MappingProxyType({}),
) -> Loaded:
    """Apply the recipe, then topology, environment and overrides; later ones take precedence.

    Args:
      recipe_path: a Python file with `get_config()`, or the folder of a run, which provides its model, tokenizer and
        training length.
      topology_name, overrides, environment: those of `resolve`.

    Raises ConfigError if the recipe is missing, broken, or has a URL with a password, and where `resolve` does.
    """
    recipe_path = os.fspath(recipe_path)
    config, origins = run_recipe(recipe_path)
    name, values = pathlib.Path(recipe_path).stem, flat(config)
    refuse_passwords(values)
    loaded = resolve(config, origins, name, recipe_path, topology_name, overrides, environment)
    loaded.origin = {"recipe": recipe_path, "recipe_config": values}
    return loaded


def of_workspace(recipe: str) -> str:
    """Return the path of a recipe of this workspace, even if the current folder has a file of the same name."""
    file = ROOT / recipe
    return str(file) if pathlib.Path.cwd() != ROOT and file.is_file() else recipe


def recipe_names() -> list[str]:
    """Return the names of the files in configs/ with a get_config(), such as base, medium and trm/sudoku."""
    folder = ROOT / "configs"
    found = [path for path in source_files(folder) if "\ndef get_config(" in path.read_text()]
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in found)


def run_recipe(path: str) -> tuple[ConfigDict, dict[str, str]]:
    """Execute a recipe file; return its configuration, and which recipe file set each key that differs from base.

    Nothing in a run's folder is executed; the folder provides the model that is stored there.
    """
    folder = expanded(path)
    if stored_config.is_run(folder):
        return stored_config.load_as_recipe(folder)
    file = next((p for p in (folder, ROOT / folder) if p.is_file()), None)

    def near() -> str:
        known = similar(path.removeprefix("configs/").removesuffix(".py"), recipe_names())
        return did_you_mean([f"configs/{name}.py" for name in known]) or "; configs/ has the recipes of this workspace"

    if file is None:
        what = "is a folder without a run (no config.json there)" if folder.is_dir() else "is not a file"
        places = " and ".join(dict.fromkeys(map(str, (pathlib.Path.cwd(), ROOT))))
        raise ConfigError(f"--config={path} {what} (looked in {places}){near()}")
    if file.suffix in READERS:
        config = READERS[file.suffix](file)
        values, defaults = flat(config), flat(base.get_config())
        return config, dict.fromkeys((key for key in values if values[key] != defaults[key]), path)
    if file.suffix != ".py":
        raise ConfigError(f"--config={path} is not a Python file, as recipes are{near()}")

    def result(module: types.ModuleType) -> tuple[ConfigDict, dict[str, str]]:
        if "get_config" not in vars(module):
            raise ValueError(f"it has no get_config(), as recipes have{near()}")
        config = module.get_config()
        if not isinstance(config, ConfigDict):
            raise ValueError("get_config() must return a configuration; does it end with `return config`?")
        if flat(config).keys() != base.KEYS.keys():
            raise ValueError("get_config() must return the configuration of configs/base.py, changed")
        config = copy.deepcopy(ConfigDict(config))  # it may be frozen, or one that a parent changes when it is called
        return config, _origins(module, flat(config), path)

    return run_file(file, f"--config={path}", result)


class _FromText(importlib.machinery.SourceFileLoader):
    """Compiles the source each time: Python would reuse bytecode after an edit of the same size in the same second."""

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def run_file(file: pathlib.Path, typed: str, result: Callable[[types.ModuleType], Any]) -> Any:
    """Execute a Python file that a user named; return `result` of its module.

    `typed` is the flag that named the file, for messages. Raises ConfigError if the file or `result` fails; the message
    has the line of the file.
    """
    file = file.absolute()  # as Python names it in tracebacks
    name = f"recipe_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file, loader=_FromText(name, str(file)))
    module = importlib.util.module_from_spec(spec)
    try:
        with _importable(module):
            spec.loader.exec_module(module)
            return result(module)
    except (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError,
            SyntaxError, TypeError, ValueError, subprocess.SubprocessError, RequiredValueError) as error:  # fmt: skip
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
        line = frames[-1].lineno if frames else error.lineno if isinstance(error, SyntaxError) else 0
        where = f", line {line}" if line else ""
        raise ConfigError(f"{typed}{where}: {_plain(error)}") from error


@contextlib.contextmanager
def _importable(module: types.ModuleType):
    """Within the block a module can be found by its name, as dataclasses need it for the types of their fields."""
    earlier = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        del sys.modules[module.__name__]
        if earlier:
            sys.modules[module.__name__] = earlier


def _plain(error: Exception) -> str:
    """Return what is wrong in a line, without the list of all keys that ml_collections adds."""
    text = " ".join(str(error).replace("\\n", " ").replace('\\"', '"').split())
    if meant := re.search(r'Did you mean "(\w+)" instead of "(\w+)"', text):
        return f"{meant[2]} is not a key{did_you_mean([meant[1]])}"
    if unknown := re.search(r'Key "(\w+)" does not exist', text):
        return f"{unknown[1]} is not a key"
    if wrong := WRONG_TYPE.search(text):
        name, value, has, wants = wrong.groups()
        return f"{name}={value} has type {has}, and must have type {wants}"
    raised_in = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    if "ml_collections" in raised_in.parts and (read := re.fullmatch(r"[\"']*(\w+)[\"']*", text)):
        return f"{read[1]} is not a key"
    if isinstance(error, KeyError):  # of the environment, or of a dictionary of the recipe
        return f"KeyError: {text}"
    return text or type(error).__name__


def _origins(recipe: types.ModuleType, values: dict[str, object], path: str) -> dict[str, str]:
    """Return the file that set each key that differs from base, or that a recipe set back to the value of base.

    `values` are those of the recipe. Inherited ones have the origin of the parent recipe, which is the imported recipe
    with the fewest differences.
    """
    imported = [module for module in vars(recipe).values() if isinstance(module, types.ModuleType)]
    parents = [(module, found) for module in imported if (found := _values_of_recipe(module))]
    parent, of_parent = min(
        parents, key=lambda one: len(_changed(one[1], values)), default=(base, flat(base.get_config()))
    )
    file = pathlib.Path(parent.__file__)
    name = str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file)
    inherited = {} if parent is base else _origins(parent, of_parent, name)
    return inherited | dict.fromkeys(_changed(of_parent, values), path)


def _values_of_recipe(module: types.ModuleType) -> dict[str, object]:
    """Return the values of a module that is a recipe; {} for any other, which may have a get_config of its own."""
    get_config = vars(module).get("get_config")
    if not callable(get_config):
        return {}
    if any(one.default is one.empty for one in inspect.signature(get_config).parameters.values()):
        return {}
    config = get_config()
    values = flat(config) if isinstance(config, ConfigDict) else {}
    return values if values.keys() == base.KEYS.keys() else {}


def _changed(before: dict[str, object], after: dict[str, object]) -> list[str]:
    return [key for key, value in before.items() if after[key] != value]
