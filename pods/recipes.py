# SPDX-License-Identifier: Apache-2.0
"""Converts settings to the arguments of train.py: recipe, slice, folder of the run, and configuration keys."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence

from configs import topologies
from configs.errors import ConfigError
from pods import switches
from pods.calls import note
from pods.errors import usage_error
from pods.settings import FIELDS, Settings, is_per_host
from pods.transports import Transport
from settings import loading, simulation, together, validation
from settings.resolving import Loaded

MESH_VARIABLES = ("TPU_MESH_CONFIG", "TPU_AXIS_NAMES")  # of this machine, passed to the hosts
DATA = {"data.source", "data.path", "data.mixture", "data.stream"}  # keys that say which data a run reads
# The documents of C4 that are read if SPLIT is not set: the whole data set has hundreds of gigabytes.
C4_PART = "[:1000000]"
DTYPES = {"bf16": "bfloat16", "f32": "float32"}
V5E, V5E_AT_GOOGLE = "v5e-", "v5litepod-"  # the one accelerator type with another name at Google


def resolved_switches(settings: Settings) -> switches.Resolved:
    """Return the ENABLE_* switches as flags, environment, OPTIMIZATION_CONFIG and --preset set them, in this order.

    Those that the configuration cannot have are left out. Raises ConfigError if it cannot run even without switches.
    """
    values = {name: getattr(settings, name.lower()) for name in (switches.ALL, *switches.SWITCHES)}
    typed = {name: value for name, value in values.items() if settings.given(name.lower())}
    stored = switches.read_file(settings.optimization_config) if settings.optimization_config else {}
    found, keys = switches.resolve(values, stored, typed), chosen_data_keys(settings)
    arguments(settings, keys)
    for name in found.on:
        with_it = keys | switches.SWITCHES[name]
        try:
            arguments(settings, with_it)
        except ConfigError as error:
            found = found._replace(left_out=found.left_out | {name: str(error)})
        else:
            keys = with_it
    return found


def print_left_out(settings: Settings, found: switches.Resolved) -> None:
    """Print a line for each enabled switch that the configuration cannot have."""
    for line in found.lines():
        note(settings, line)


def of_pod(settings: Settings, transport: Transport) -> Settings:
    """Return the settings with the pod's accelerator type; a usage error if the user typed another."""
    pod = None if settings.dry_run or settings.type else transport.describe()
    actual = pod.get("acceleratorType") if pod else None
    if not actual or ours(actual) == ours(settings.accel):
        return settings
    if settings.given("accel"):
        raise usage_error(f"ACCEL={settings.accel}, but the pod {settings.name} is a {actual}; leave ACCEL out")
    return dataclasses.replace(settings, accel=actual)


def ours(accelerator: str) -> str:
    """Return our name of an accelerator type of Google."""
    return accelerator.replace(V5E_AT_GOOGLE, V5E)


def preset(settings: Settings) -> topologies.Topology | None:
    """Return the topology of the pod, all its slices, from configs/topologies.py; None if there is none."""
    name = ours(settings.accel)
    if settings.type:
        wanted = f"{settings.type}:{settings.topology}"
        name = next((name for name, values in topologies.SLICES.items() if values[-1] == wanted), "")
    if name not in topologies.SLICES:
        return None
    return topologies.get(f"{settings.slices}x{name}" if settings.slices > 1 else name)


def arguments(settings: Settings, keys: Mapping[str, object], more: Sequence[str] = (), workdir: str = "") -> list[str]:
    """Return the arguments of train.py. Later ones win: `keys`, then keys set by variables, then typed ones.

    Args:
      keys: dotted configuration keys of the subcommand.
      more: arguments of train.py, after all others.
      workdir: folder of the run; "" gives no --workdir.

    Raises:
      ConfigError: the resulting configuration cannot run.
      PodError: as `training_keys`.
    """
    keys, topology = dict(keys) | training_keys(settings), preset(settings)
    words = [f"--config={settings.recipe}"] + ([f"--workdir={workdir}"] if workdir else [])
    words += [f"--topology={topology.name}"] if topology else []
    words += [f"--join_seconds={settings.join_seconds}"]
    words += [f"--config.{key}={value}" for key, value in keys.items()]
    words += [f"--config.{text}" for text in settings.overrides] + list(more)
    check(settings, words)
    return words


def training_keys(settings: Settings) -> dict[str, object]:
    """Return the configuration keys that the earlier systems' variables set; the recipe decides all others."""
    keys = {
        "train.steps": settings.steps,
        "train.global_batch": settings.batch_size,
        "optimizer.learning_rate": settings.lr,
        "model.dtype": DTYPES.get(settings.dtype, ""),
        "model.num_experts": settings.num_experts,
        "data.tokenizer": settings.spm_model,
    }
    if settings.per_device_batch and not settings.batch_size:
        if (topology := preset(settings)) is None:
            raise usage_error(f"PER_DEVICE_BATCH: the number of chips of {settings.accel} is unknown; set BATCH_SIZE")
        keys["train.global_batch"] = settings.per_device_batch * topology.chips
    return {key: value for key, value in keys.items() if value} | length_keys(
        f"--config={settings.recipe}", settings.seq_len
    )


def length_keys(recipe: str, length: int | None) -> dict[str, int]:
    """Return the keys for a sequence length, with model.max_length if it exceeds the recipe's; {} for 0 or None.

    `recipe` is the --config=FILE of train.py.
    """
    if not length:
        return {}
    longest = loading.load(loading.of_workspace(recipe.removeprefix("--config=")), "", {}).config.model.max_length
    return {"train.sequence_length": length} | ({"model.max_length": length} if length > longest else {})


def storage_keys(workdir: str, num_workers: int) -> dict[str, object]:
    """Return the key for a run that has a different folder on each host."""
    return {"checkpoint.per_host": True} if is_per_host(workdir, num_workers) else {}


def data_keys(settings: Settings) -> dict[str, object]:
    """Return the configuration keys of the Hugging Face data sets DATASET and DATASET2; of C4 a part without SPLIT."""
    is_c4 = settings.dataset == FIELDS["dataset"].default
    first = f"{settings.dataset}:{settings.split}{C4_PART if is_c4 and not settings.given('split') else ''}"
    is_typed = settings.given("config") and not settings.config.endswith(".py")  # else it is a recipe
    subset = settings.config if is_typed else FIELDS["config"].default if is_c4 else ""
    keys = {"data.source": "huggingface", "data.subset": subset, "data.field": settings.text_key}
    if not settings.dataset2:
        return keys | {"data.path": first}
    if settings.config2 not in ("", subset):
        raise usage_error(
            f"CONFIG2={settings.config2} differs from CONFIG={subset}, but both data sets are read with one "
            "configuration; leave CONFIG2 out"
        )
    if not 0 < settings.mix_p2 < 1:
        raise usage_error(f"MIX_P2={settings.mix_p2} must lie between 0 and 1: it is DATASET2's part of the tokens")
    second = f"{settings.dataset2}:{settings.split2}"
    return keys | {"data.mixture": f"{1 - settings.mix_p2:.6g} {first}; {settings.mix_p2:.6g} {second}"}


def chosen_data_keys(settings: Settings) -> dict[str, object]:
    """Return `data_keys` if the user chose a data set; otherwise {}, so that the recipe's own data are read."""
    return data_keys(settings) if settings.given("dataset") else {}


def pretraining_keys(settings: Settings, more: Sequence[str] = ()) -> dict[str, object]:
    """Return `data_keys`; {} if the recipe, a typed key, or an argument of train.py in `more` names other data."""
    if settings.given("dataset"):
        return data_keys(settings)
    typed = {word.lstrip("-").removeprefix("config.").partition("=")[0] for word in (*settings.overrides, *more)}
    own = load([f"--config={settings.recipe}"]).config.data
    named = own.source != "auto" or any((own.path, own.mixture, own.stream))
    return {} if named or typed & DATA else data_keys(settings)


def buckets_of_data(words: Sequence[str]) -> list[str]:
    """Return the buckets, as gs://NAME, that the configuration of train.py's arguments reads data from."""
    data = load(words).config.data
    text = " ".join((data.path, data.mixture, data.stream, data.validation_path, data.tokenizer))
    return sorted(set(re.findall(r"gs://[^/\s,;:]+", text)))


def load(words: Sequence[str]) -> Loaded:
    """Return the configuration of train.py's arguments; ConfigError if a key or the recipe is wrong."""
    flags = dict(word.lstrip("-").split("=", 1) for word in words if "=" in word)
    mesh = {name: os.environ[name] for name in MESH_VARIABLES if os.environ.get(name)}
    typed = {name.removeprefix("config."): value for name, value in flags.items() if name.startswith("config.")}
    return loading.load(loading.of_workspace(flags["config"]), flags.get("topology", ""), typed, mesh)


def check(settings: Settings, words: list[str]) -> None:
    """Raise ConfigError for arguments that train.py would refuse on every host."""
    loaded = load(words)
    if loaded.topology is None:
        validation.check_keys(loaded.config)
        return together.check_typed(loaded)
    validation.resolve_mesh(loaded.config, loaded.topology.chips)
    if settings.transport == "local":
        simulation.scale_down(loaded.config, loaded.typed)
    validation.validate(loaded.config, loaded.topology.chips, loaded)
