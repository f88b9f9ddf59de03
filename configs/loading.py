# SPDX-License-Identifier: Apache-2.0
"""From a recipe file, a topology, the environment and typed overrides to one configuration that knows its origins."""

import dataclasses
import difflib
import functools
import importlib.util
import math
import pathlib
import re
import traceback
import types
from collections.abc import Callable, Mapping, Sequence

from ml_collections import ConfigDict

from configs import base, topologies
from configs.base import MESH_AXES, ConfigError, shown
from files.json_reader import JsonError, object_of, read_json

EXPERT_CHIPS = 8  # of a preset, over which experts are split at most: an all-to-all over more travels farther
WHOLE_EXPERTS_BYTES = 2**28  # of a layer's experts in bfloat16, which up to that are brought whole as other weights are
ROOT = pathlib.Path(__file__).resolve().parent.parent
FREE_OF_STORED = (
    "data.", "evaluation.", "mesh.", "layout.", "checkpoint.keep", "model.remat", "model.layer_loop",
    "train.global_batch", "batch.",
)  # fmt: skip
OF_ITS_DEVICES = ("mesh.", "layout.", "batch.")  # sections of a run that whoever reads it does not take over
LENGTHS = ("train.sequence_length", "model.max_length")  # free too where no weight knows them
DATA_READ = ("data.path", "data.mixture", "data.validation_path")  # one of them typed is all that is evaluated
EARLIER_AXES = ("data", "model", "fsdp")  # of three numbers in TPU_MESH_CONFIG, in the system that Torus took over from
LARGEST_AXIS = 1_000_000  # devices along an axis of a mesh
OF_A_MODEL = ("data.tokenizer", "train.sequence_length", "optimizer.bias_step")  # what goes with it, beside its section
ALWAYS_STORED = ("model.name", "model.max_length", "train.objective", "data.tokenizer")  # by every version
OF_THE_HOST = ("data.cache_dir", "data.readers", "data.prefetch")  # keys that change how data is read, not what
NAMES_ELSEWHERE = {  # what other programs call some keys
    "batch_size": "train.global_batch", "num_epochs": "train.epochs", "max_steps": "train.steps",
    "num_steps": "train.steps", "seq_len": "train.sequence_length", "block_size": "train.sequence_length",
    "d_model": "model.embed_dim", "hidden_size": "model.embed_dim", "n_embd": "model.embed_dim",
    "n_layer": "model.num_layers", "num_hidden_layers": "model.num_layers", "n_head": "model.num_heads",
    "num_attention_heads": "model.num_heads", "intermediate_size": "model.mlp_dim", "dataset": "data.path",
}  # fmt: skip
ALTERNATIVES = (  # groups of keys of which one holds; a typed one puts the others out of force
    (("train.steps", "train.tokens", "train.epochs"), "say how long to train"),
    (("data.path", "data.mixture"), "say what to train on"),
)


@dataclasses.dataclass
class Loaded:
    """A configuration and its history.

    `recipe` is the name of the file `path`; `origins` gives for each dotted key that differs from configs/base.py what
    set it last; `environment_mesh` is what TPU_MESH_CONFIG says, {axis: devices} in its order, {} where it is not set.
    """

    config: ConfigDict
    recipe: str
    path: str
    topology: topologies.Topology | None
    typed: dict[str, object]
    origins: dict[str, str]
    environment_mesh: dict[str, int] = dataclasses.field(default_factory=dict)


def flat(config: ConfigDict) -> dict[str, object]:
    """Return {"section.key": value} in alphabetical order, which is that of a ConfigDict."""
    return {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}


def assign(config: ConfigDict, key: str, value) -> None:
    """Set one dotted key."""
    section, name = key.split(".")
    config[section][name] = value


def from_flat(values: dict[str, object]) -> ConfigDict:
    """Return a configuration with these values of dotted keys, the others as in configs/base.py."""
    config = base.get_config()
    for key, value in values.items():
        assign(config, key, value)
    return config


def load(
    recipe_path: str,
    topology_name: str,
    overrides: dict[str, str],
    environment: Mapping[str, str] = types.MappingProxyType({}),
) -> Loaded:
    """Apply recipe, then topology, then environment, then overrides, the later winning.

    Args:
      recipe_path: a Python file with `get_config()`, or the folder of a run, which stands for its model, its tokenizer
        and the length that it was trained with.
      topology_name: a preset of configs/topologies.py, or "" for the attached devices.
      overrides: text as typed, by dotted key.
      environment: variables, of which TPU_MESH_CONFIG and TPU_AXIS_NAMES are read.

    Raises:
      ConfigError: a missing or broken recipe, an unknown topology or key, a value of the wrong type.
    """
    config, origins = _run_recipe(recipe_path)
    topology = topologies.get(topology_name) if topology_name else None
    mesh = environment_mesh(environment)
    typed = {key: parse_value(key, text, flat(config)) for key, text in overrides.items()}
    preset = _with_experts(topology.mesh, flat(config) | typed) if topology else {}
    for axes, origin in ((preset, f"--topology={topology_name}"), (mesh, "TPU_MESH_CONFIG")):
        for axis in MESH_AXES if axes else ():
            assign(config, f"mesh.{axis}", axes.get(axis, 1))
            origins[f"mesh.{axis}"] = origin
    if mesh:
        config.layout.axis_order = ",".join(dict.fromkeys(("dcn_data", *mesh, *MESH_AXES)))
        origins["layout.axis_order"] = "TPU_MESH_CONFIG"
    _refuse_empty(typed, flat(config))
    typed |= _put_out_of_force(typed, flat(config))
    for key, value in typed.items():
        assign(config, key, value)
        origins[key] = "command line"
    return Loaded(config, pathlib.Path(recipe_path).stem, recipe_path, topology, typed, origins, mesh)


def _with_experts(mesh: dict[str, int], values: dict[str, object]) -> dict[str, int]:
    """Return a preset's mesh, a part of its fsdp given to experts where these are too large to be brought whole."""
    experts = values["model.num_experts"]
    size = 2 * 3 * experts * values["model.embed_dim"] * values["model.mlp_dim"]
    expert = math.gcd(experts, mesh["fsdp"], EXPERT_CHIPS) if size > WHOLE_EXPERTS_BYTES else 1
    return mesh | {"fsdp": mesh["fsdp"] // expert, "expert": expert}


def environment_mesh(environment: Mapping[str, str]) -> dict[str, int]:
    """Return {axis: devices} by TPU_MESH_CONFIG="4,4,2" and TPU_AXIS_NAMES="data,model,fsdp", in this order.

    {} where TPU_MESH_CONFIG is not set; three numbers without names are EARLIER_AXES.

    Raises:
      ConfigError: sizes that are no whole numbers greater than 0, names that are not one mesh axis for each of them.
    """
    sizes, names = (environment.get(name, "").strip() for name in ("TPU_MESH_CONFIG", "TPU_AXIS_NAMES"))
    if not sizes and names:
        raise ConfigError(
            f"TPU_AXIS_NAMES={shown(names)} without TPU_MESH_CONFIG, a number of devices for each; set both"
        )
    if not sizes:
        return {}
    numbers = [part.strip() for part in sizes.split(",")]
    if not names and len(numbers) != len(EARLIER_AXES) and all(number.isdigit() for number in numbers):
        raise ConfigError(
            f"TPU_MESH_CONFIG={shown(sizes)} needs TPU_AXIS_NAMES, a name for each number, of {', '.join(MESH_AXES)}; "
            f"only three numbers go without, as {','.join(EARLIER_AXES)}"
        )
    axes = [name.strip() for name in names.split(",")] if names else EARLIER_AXES
    said = f"TPU_MESH_CONFIG={shown(sizes)}" + (f" TPU_AXIS_NAMES={shown(names)}" if names else "")
    if "dcn_data" in axes[1:]:
        raise ConfigError(f"{said}: dcn_data, the network between slices, changes slowest; name it first")
    return mesh_sizes(axes, numbers, said)


def mesh_sizes(axes: Sequence[str], numbers: Sequence[str], said: str) -> dict[str, int]:
    """Return {axis: devices} of text; ConfigError, which begins with what was said, where it is no mesh."""
    sizes = [int(number) if re.fullmatch("[0-9]{1,20}", number) else 0 for number in numbers]
    wrong = [shown(number) for number, size in zip(numbers, sizes, strict=True) if not 1 <= size <= LARGEST_AXIS]
    unknown = [axis for axis in axes if axis not in MESH_AXES]
    if wrong:
        limit = f", and at most {LARGEST_AXIS:,}" if wrong[0].isdigit() else ""
        raise ConfigError(f"{said}: {wrong[0]!r} is not a whole number greater than 0{limit}, as in 4,4,2")
    if unknown:
        unknown = shown(unknown[0])
        near = nearest(unknown, MESH_AXES)
        raise ConfigError(f"{said}: {unknown!r} is no mesh axis; nearest: {near} (all: {', '.join(MESH_AXES)})")
    if len(set(axes)) < len(axes):
        raise ConfigError(f"{said}: {max(axes, key=axes.count)} is named more than once; name each axis once")
    if len(axes) != len(numbers):
        raise ConfigError(f"{said}: {len(numbers)} numbers, but {len(axes)} names; give a name for each number")
    return dict(zip(axes, sizes, strict=True))


def load_stored(workdir: pathlib.Path, overrides: dict[str, str]) -> Loaded:
    """Return the configuration that a run left in its workdir, on whatever devices there are, then overrides.

    Raises:
      ConfigError: there is no run in `workdir`, its configuration is damaged, or as in `load`.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise ConfigError(f"--workdir={workdir} holds no run (no config.json there); train first, or name another")
    config, kept = base.get_config(), _read_stored(path)
    free = [key for key in kept if key.startswith(FREE_OF_STORED) and key != "data.tokenizer"]
    free += LENGTHS if kept["model.name"] == "decoder_lm" else ()
    fixed = [key for key in overrides if key in kept and key not in free]
    if fixed:
        raise ConfigError(f"--config.{fixed[0]} is fixed by the run in {workdir}; leave it out")
    stored = flat(config) | {key: value for key, value in kept.items() if not key.startswith(OF_ITS_DEVICES)}
    if stored["train.objective"] in base.OF_TWO_MODELS:  # a teacher is needed to train alone
        stored |= {"train.objective": "language_modeling", "distillation.teacher": ""}
    stored |= {"lora.rank": 0}  # adapters are merged where they are read, see training/other_run.py
    if stored["data.tokenizer"] != "byte":
        files = [workdir / name for name in ("tokenizer.json", "tokenizer.model")]  # as imported, or trained
        stored["data.tokenizer"] = str(next((file for file in files if file.is_file()), files[-1]))
    typed = {key: parse_value(key, text, stored) for key, text in overrides.items()}
    _refuse_empty(typed, stored)
    others = DATA_READ if any(typed.get(key) for key in DATA_READ) else ()
    typed |= {key: "" for key in others if not typed.get(key)}
    # Evaluated on longer sequences than it was trained on, a model has room for them.
    stored["model.max_length"] = max(stored["model.max_length"], typed.get("train.sequence_length", 0))
    for key, value in (stored | typed).items():
        assign(config, key, value)
    origins = dict.fromkeys(kept, str(path)) | dict.fromkeys(typed, "command line")
    return Loaded(config, workdir.name, str(path), None, typed, origins)


@functools.cache
def stored_schema() -> type:
    """Return the schema of a flat configuration: of each key the type of its default."""
    kinds = {key: type(value) for key, value in flat(base.get_config()).items()}
    return object_of(kinds, required=ALWAYS_STORED)


def _read_stored(path: pathlib.Path) -> dict[str, object]:
    """Return the flat configuration in a run's config.json; a key that an older version did not have is missing."""
    try:
        stored = read_json(path, stored_schema())
    except JsonError as error:
        raise ConfigError(f"{error}; bring it back, each checkpoint's record.json has a copy, as `config`") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a run that can be read") from None
    if unknown := stored.keys() - flat(base.get_config()).keys():
        first = shown(min(unknown))
        raise ConfigError(f"{path} has {first}, which this version does not know; use the version that wrote it")
    return stored


def run_folder(key: str, name: str, path: Callable = pathlib.Path):
    """Return the folder of a run that a key names; ConfigError where it holds none.

    Args:
      path: makes a path of its name.
    """
    folder = path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{key}={name} holds no run (no config.json there); name the folder of one")
    return folder


def parse_value(key: str, text: str, current: dict[str, object]):
    """Return `text` as the type of the key's default; ConfigError names the nearest key or the type."""
    if key not in current:
        raise ConfigError(f"--config.{key} is no configuration key; nearest: {' or '.join(nearest_keys(key, current))}")
    kind = type(current[key])
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise ConfigError(f"--config.{key}={shown(text)} is not {wanted} (now {current[key]})") from None


def _refuse_empty(typed: dict, current: dict) -> None:
    """Raise ConfigError where what a run builds on is typed as nothing, and is nothing: a variable that is not set."""
    empty = [key for key in (*DATA_READ, "train.init_from") if typed.get(key) == current[key] == ""]
    if empty:
        raise ConfigError(f"--config.{empty[0]}= has no value; give it one, or leave it out")


def nearest(name: str, candidates) -> str:
    """Return the candidate most like `name`."""
    return difflib.get_close_matches(name, candidates, n=1, cutoff=0.0)[0]


def nearest_keys(name: str, keys) -> list[str]:
    """Return the keys whose last part is that of `name`, or has it for initials (lr), else the one most like it.

    If some of them are of its section, only these; of a name from elsewhere the key that is meant by it.
    """
    section, _, last = name.rpartition(".")
    if last in NAMES_ELSEWHERE:
        return [NAMES_ELSEWHERE[last]]
    leaves = {key: key.split(".")[-1] for key in keys}
    alike = [key for key, leaf in leaves.items() if leaf == last]
    alike = alike or [key for key, leaf in leaves.items() if "".join(word[:1] for word in leaf.split("_")) == last]
    return [key for key in alike if key.startswith(section + ".")] or alike or [nearest(name, keys)]


def one_of(key: str, value: str, choices) -> None:
    """Raise ConfigError where the value of a key is none of the choices."""
    if value not in choices:
        near = nearest(shown(value), list(map(str, choices)))
        raise ConfigError(f"{key}={shown(value)} is unknown; nearest: {near} (all: {', '.join(map(str, choices))})")


def recipe_names() -> list[str]:
    """Return the files of configs/ that have a get_config(), base among them, as in medium and trm/sudoku."""
    folder = ROOT / "configs"
    found = [path for path in folder.rglob("*.py") if "\ndef get_config(" in path.read_text()]
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in found)


def _put_out_of_force(typed: dict, current: dict) -> dict:
    """Return what becomes of the alternatives to typed keys: nothing, 0 or ''."""
    emptied = {}
    for keys, both in ALTERNATIVES:
        given = [key for key in keys if typed.get(key)]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both {both}; give one")
        emptied |= {key: type(current[key])() for key in keys if given and key not in given}
    return emptied


def _run_recipe(path: str) -> tuple[ConfigDict, dict[str, str]]:
    """Execute the recipe file; return its configuration, and the recipe file that each changed key is from."""
    folder = pathlib.Path(path).expanduser()
    if (folder / "config.json").is_file():
        return _of_run(folder)
    file = next((p for p in (pathlib.Path(path), ROOT / path) if p.is_file()), None)
    near = nearest(path.removeprefix("configs/").removesuffix(".py"), recipe_names())
    if file is None:
        what = "is a folder without a run (no config.json there)" if folder.is_dir() else "is no file"
        raise ConfigError(f"--config={path} {what}; nearest recipe: configs/{near}.py")
    if file.suffix != ".py":
        raise ConfigError(f"--config={path} is no Python file, as recipes are; nearest recipe: configs/{near}.py")
    spec = importlib.util.spec_from_file_location(f"recipe_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
        if flat(config).keys() != flat(base.get_config()).keys():
            raise ValueError("get_config() must return the configuration of configs/base.py, changed")
        return config, _origins(module, path)
    except (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError,
            SyntaxError, TypeError, ValueError) as error:  # fmt: skip
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
        line = frames[-1].lineno if frames else error.lineno if isinstance(error, SyntaxError) else 0
        where = f", line {line}" if line else ""
        raise ConfigError(f"--config={path}{where}: {' '.join(str(error).split())}") from error


def _of_run(folder: pathlib.Path) -> tuple[ConfigDict, dict[str, str]]:
    """Return the recipe that a run's folder stands for: what others need to build on it, else configs/base.py."""
    stored = flat(load_stored(folder, {}).config)
    kept = {key: value for key, value in stored.items() if key.startswith("model.") or key in OF_A_MODEL}
    config, default = from_flat(kept), flat(base.get_config())
    return config, {key: str(folder / "config.json") for key, value in kept.items() if value != default[key]}


def _origins(recipe: types.ModuleType, path: str) -> dict[str, str]:
    """Return the file of each key that differs from base, or that a recipe set back; what it inherited is the other's.

    A recipe is built on that one of the recipes it imports from which it differs least.
    """
    values = flat(recipe.get_config())

    def changed(parent: types.ModuleType) -> list[str]:
        return [key for key, value in flat(parent.get_config()).items() if values[key] != value]

    imported = [module for module in vars(recipe).values() if isinstance(module, types.ModuleType)]
    parents = [module for module in imported if "get_config" in vars(module)]
    parent = min(parents, key=lambda module: len(changed(module)), default=base)
    inherited = {} if parent is base else _origins(parent, f"configs/{pathlib.Path(parent.__file__).name}")
    return inherited | dict.fromkeys(changed(parent), path)
