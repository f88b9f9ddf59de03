# SPDX-License-Identifier: Apache-2.0
"""The configuration that a run stores in its folder, which applies when the run is resumed or used.

`config.json` has the value of every key, and `run.json` the recipe that the run was started with. Both are data, and
nothing in them is executed. Typed keys take precedence; docs/resume.md says which keys may change.
"""

import pathlib
from collections.abc import Callable, Mapping

from ml_collections import ConfigDict

from configs import base
from configs.base import BUILT_IN_TOKENIZERS, KEYS, keys_of
from configs.errors import ConfigError, shown
from configs.key import MACHINE, READ, RESUME, SECRET, WEIGHTS
from files.folders import names_in
from files.json_reader import JsonError, Object, Scalar, read_json
from files.paths import expanded
from settings import together
from settings.keys import DATA_READ, flat, from_flat, parse_typed
from settings.resolving import Loaded, resolve

CONFIG, ORIGIN = "config.json", "run.json"
SUMMARY = "summary.txt"  # of a run that has finished
OF_TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.model"}  # of any kind
UNFINISHED = ".unfinished"  # STEP.unfinished marks the folder of a checkpoint that is being written or deleted
RUNS = "train.init_from", "distillation.teacher"  # keys that name another run; a recipe there may only be typed
PLACES = {"data.cache_dir", "checkpoint.staging"}  # folders of the machine, which a run's folder may not choose
PUBLISHED = {"architectures", "model_type"}  # keys of the config.json of published models, and of no run's
OF_TRAINING = ("batch.", "train.spike_deviations")  # sections and keys that do not apply when a run is only read


class Origin(Object, total=False):
    """The content of run.json: the recipe that a run was started with, its values, and the last command."""

    recipe: str
    recipe_config: dict[str, Scalar]
    command: list[str]


class _Record(Object, total=False):
    weights_only: list[str]


def is_run(folder) -> bool:
    return (folder / CONFIG).is_file()


def run_folder(key: str, name: str, path: Callable = pathlib.Path):
    """Return the folder of a run that a key names; ConfigError if it holds none.

    `path` makes a path of an address, such as gs://BUCKET/NAME.
    """
    folder = path(name) if "://" in name else expanded(name)
    if not is_run(folder):
        raise ConfigError(f"{key}={name} holds no run (no {CONFIG} there); name the folder of one")
    return folder


def trained_to(folder) -> int | None:
    """Return the step of the newest checkpoint that a run trained; None if there is none, or only imported weights.

    The checkpoint is not verified here, but when it is restored.
    """
    step, record = _newest_record(folder)
    return None if "weights_only" in record else step


def _newest_record(folder) -> tuple[int | None, _Record]:
    """Return (step, record) of the newest checkpoint; (None, {}) without one."""
    checkpoints = folder / "checkpoints"
    names = names_in(checkpoints)
    is_marked = {name.removesuffix(UNFINISHED) for name in names if name.endswith(UNFINISHED)}  # in a bucket a file
    steps = [int(name) for name in names if name.isdecimal() and name.isascii() and name not in is_marked]
    if not steps:
        return None, {}
    try:
        return max(steps), read_json(checkpoints / str(max(steps)) / "record.json", _Record)
    except (JsonError, OSError):  # damaged, which the restore reports
        return max(steps), {}


def read_config(folder) -> dict[str, Scalar]:
    """Return the value of every key that a run stored.

    Raises:
      ConfigError: there is no run, or its configuration is damaged or of a later version.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigError(
            f"--workdir={folder} holds no run: there is no {path.absolute()}; train first, or name another"
        )
    try:
        values = read_json(path, Object)
    except JsonError as error:
        raise ConfigError(f"{error}; each checkpoint's record.json has a copy, as `config`") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a run that can be read") from None
    if PUBLISHED & values.keys():
        raise ConfigError(
            f"{folder} holds a published model and no run; import it by convert.py import --hf={folder} "
            "--workdir=FOLDER, and name that folder"
        )
    if unknown := values.keys() - KEYS.keys():
        first = shown(min(unknown))
        raise ConfigError(f"{path} has {first}, which this version does not know; use the version that wrote it")
    for key in ("model.name", "train.objective"):
        if key not in values:
            raise ConfigError(f"{path}: {key} is missing; each checkpoint's record.json has a copy, as `config`")
    check_types(values, str(path))
    for key in RUNS:
        if values.get(key, "").endswith(".py"):
            raise ConfigError(f"{path}: {key} should be the folder of a run, but is {shown(values[key])}, a program")
    return together.without_unread(flat(from_flat(values)))


def check_types(values: Mapping[str, Scalar], source: str) -> None:
    """Raise ConfigError if the value of a dotted key has another type than its default; unknown keys are ignored."""
    for key in (key for key in values if key in KEYS):
        value, kind = values[key], type(KEYS[key].default)
        allowed = int | float if kind is float else kind
        if not isinstance(value, allowed) or isinstance(value, bool) != (kind is bool):
            raise ConfigError(f"{source}: {key} should be of type {kind.__name__}, but is {value!r:.60}")


def load_to_continue(
    folder, step: int | None, recipe: tuple[str, ConfigDict] | None, topology: str, overrides: dict[str, str],
    environment: Mapping[str, str],
) -> Loaded:  # fmt: skip
    """Return the configuration for resuming a run: stored values, then typed keys.

    Keys of the machine are those of the recipe, whether it is named again or not.

    Args:
      step: to which the run was trained, as `trained_to` returns it.
      recipe: name and configuration of the typed recipe; it must be the one that the run was started with.

    Raises:
      ConfigError: the stored configuration cannot be read, another recipe or a key that may not change was typed, or
        `resolve` raises it.
    """
    stored, origin = read_config(folder), read_origin(folder)
    name, config = recipe or ("", base.get_config())
    notes = _check_recipe(folder, name, flat(config), overrides) if name else _places_left_out(origin, overrides)
    kept = {key: value for key, value in stored.items() if key not in keys_of(MACHINE)}
    kept |= _own_tokenizer(folder, stored)
    config.update_from_flattened_dict(kept if recipe else _machine_keys_of_recipe(folder, origin) | kept)
    loaded = resolve(config, _origins(folder, kept), folder.name, folder / CONFIG, topology, overrides, environment)
    moved = {key for key in RUNS if stored[key]}  # a checkpoint has their digests
    free = keys_of(RESUME) | moved
    fixed = KEYS.keys() if step is not None else _newest_record(folder)[1].get("weights_only", ())
    typed = together.without_unread(stored | loaded.typed)  # `validate` reports the keys that are not read
    differs = [key for key in loaded.typed if typed[key] != stored[key] and key in fixed and key not in free]
    if differs:
        what = "has imported weights" if step is None else f"was trained to step {step}"
        keys = "; ".join(f"{key}={shown(stored[key])}, now {shown(loaded.typed[key])}" for key in differs)
        raise ConfigError(
            f"{folder} {what} with {keys}. Leave out {' and '.join(f'--config.{key}' for key in differs)} to continue "
            "that run, or use a new --workdir."
        )
    if not stored["data.tokenizer"] and loaded.config.data.tokenizer == "sentencepiece":
        raise ConfigError(no_tokenizer(folder))
    loaded.notes, loaded.of_run, loaded.origin = notes, True, origin
    return loaded


def _machine_keys_of_recipe(folder, origin: Origin) -> dict[str, Scalar]:
    """Return the keys of the machine that the recipe of a run says, as they count if the recipe is named.

    Those of PLACES are left out. A folder may be a stranger's, and the compiled programs in a cache are run.
    """
    stored = origin.get("recipe_config", {})
    found = {key: value for key, value in stored.items() if key in keys_of(MACHINE) - keys_of(SECRET) - PLACES}
    check_types(found, str(folder / ORIGIN))
    return found


def _places_left_out(origin: Origin, overrides: dict[str, str]) -> list[str]:
    """Return a line for each of PLACES that the recipe of a run names, unless it is typed."""
    stored = origin.get("recipe_config", {})
    left_out = [key for key in sorted(PLACES - overrides.keys()) if stored.get(key, "") != KEYS[key].default]
    return [
        f"{key}={shown(stored[key])} of the recipe is not used, because a run's folder may not choose other folders; "
        f"name the recipe again, or type --config.{key}" for key in left_out
    ]  # fmt: skip


def no_tokenizer(name) -> str:
    """Return why a new tokenizer cannot be trained for the weights of a run that was imported without one."""
    return (
        f"{name} was imported without a tokenizer, and a new one would not fit its weights; "
        "name the model's own: --config.data.tokenizer=FILE, a tokenizer.json or a .model file, or "
        f"{' or '.join(BUILT_IN_TOKENIZERS)}"
    )


def load_to_read(
    folder, overrides: dict[str, str], recipe: tuple[str, ConfigDict] | None = None, topology: str = ""
) -> Loaded:
    """Return the configuration of a run for evaluation, inference or another run, on the devices of this machine.

    Raises:
      ConfigError: there is no run in the folder, or as for `load_to_continue`.
    """
    stored = read_config(folder)
    if recipe:
        _check_recipe(folder, recipe[0], flat(recipe[1]), overrides)
    of_machine = keys_of(MACHINE) - {"checkpoint.per_host"}  # which says where the run's checkpoints are
    free = keys_of(READ) | keys_of(MACHINE)
    if stored["model.name"] == "decoder_lm":  # no weight depends on the length
        free |= {"train.sequence_length", "model.max_length"}
    if stored["data.tokenizer"]:  # an import without one needs a typed one
        free -= {"data.tokenizer"}
    fixed = [key for key in overrides if key in stored and key not in free]
    if fixed:
        raise ConfigError(f"--config.{fixed[0]} is fixed by the run in {folder}; leave it out")
    unread = {name: key.default for name, key in KEYS.items() if name in of_machine or name.startswith(OF_TRAINING)}
    values = stored | unread
    if stored["data.tokenizer"] not in (*BUILT_IN_TOKENIZERS, ""):
        is_json = stored["data.tokenizer"].endswith(".json")
        values["data.tokenizer"] = str(folder / ("tokenizer.json" if is_json else "tokenizer.model"))
    typed = parse_typed(overrides, values)
    if any(typed.get(key) for key in DATA_READ):  # other data replace the run's own
        values |= dict.fromkeys(DATA_READ, "")
    # Allow evaluation on longer sequences than the run was trained on.
    values["model.max_length"] = max(values["model.max_length"], typed.get("train.sequence_length", 0))
    origins = dict.fromkeys(stored.keys() - unread.keys(), str(folder / CONFIG))
    config = from_flat(values)
    drop_other_models(config)
    loaded = resolve(config, origins, folder.name, folder / CONFIG, topology, overrides, {})
    loaded.of_run = True
    return loaded


def load_as_recipe(folder) -> tuple[ConfigDict, dict[str, str]]:
    """Return the configuration that a run's folder provides as a recipe, and the origin of each key.

    It has the keys that describe the weights, and for a model that is not a language model the objective, because no
    other one fits; all others are as in configs/base.py.
    """
    stored = flat(load_to_read(folder, {}).config)
    names = keys_of(WEIGHTS) | (set() if stored["model.name"] == "decoder_lm" else {"train.objective"})
    kept = {key: value for key, value in stored.items() if key in names}
    return from_flat(kept), _origins(folder, kept)


def _origins(folder, values: dict) -> dict[str, str]:
    """Return the run's configuration as the origin of each value that differs from the default."""
    return {key: str(folder / CONFIG) for key, value in values.items() if value != KEYS[key].default}


def changes(before: dict, now: dict) -> list[str]:
    """Return "key old -> new" for each key that changes when a run is resumed, except keys of the machine."""
    return [
        f"{key} {before[key]} -> {value}"
        for key, value in now.items()
        if key in before and before[key] != value and key not in keys_of(MACHINE)
    ]


def _check_recipe(folder, name: str, now: dict, overrides: dict[str, str]) -> list[str]:
    """Return notes on values of a recipe that are ignored because the run has other values.

    Raises:
      ConfigError: the recipe is not the one that the run was started with.
    """
    then = read_origin(folder).get("recipe_config")
    if not then:
        then, now = read_config(folder), together.without_unread(now)
    differs = {key: (then[key], value) for key, value in now.items() if key in then and then[key] != value}
    differs = {key: pair for key, pair in differs.items() if key not in overrides and key not in keys_of(MACHINE)}
    for key, (old, new) in differs.items():
        if key not in keys_of(RESUME):
            raise ConfigError(
                f"--config={name} is not the recipe of the run in {folder} ({key} is {shown(old)} there, {shown(new)} "
                "here); leave out --config to continue that run, or use a new --workdir"
            )
    return [
        f"{name} says {key}={new}, but the run in {folder} was started with {old} and keeps its value; "
        f"--config.{key}={new} changes it"
        for key, (old, new) in differs.items()
    ]


def read_origin(folder) -> Origin:
    """Return the content of run.json, {} for a run without one."""
    if not (folder / ORIGIN).is_file():
        return {}
    try:
        return read_json(folder / ORIGIN, Origin)
    except JsonError as error:
        raise ConfigError(f"{error}; remove the file, and continue the run without --config") from None


def _own_tokenizer(folder, stored: dict) -> dict[str, str]:
    """Return {"data.tokenizer": path in the run's folder} if the tokenizer that its configuration names is there.

    The folder may have been moved or copied since the path was stored. Returns {} otherwise.
    """
    own = folder / pathlib.PurePath(stored["data.tokenizer"]).name
    is_own = stored["data.tokenizer"].endswith((".json", ".model")) and own.is_file()
    return {"data.tokenizer": str(own)} if is_own else {}


def drop_other_models(config: ConfigDict) -> None:
    """Change a configuration in place so that it needs no other model; only training needs one.

    Reading a checkpoint merges adapters with their base, see checkpointing/source_run.py.
    """
    if config.train.objective in base.OF_TWO_MODELS:
        config.train.objective, config.distillation.teacher = "language_modeling", ""
    config.grpo.kl = 0.0
    config.lora.rank = 0
