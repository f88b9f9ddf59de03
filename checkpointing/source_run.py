# SPDX-License-Identifier: Apache-2.0
"""Weights of another run, such as a base, a reference or a teacher; and the weights of any run's checkpoint.

A run with a frozen base saves only what it trains: adapters, or a module that is added to the model. Each of its
records has a reference to the checkpoint of the base weights. Evaluation, sampling and export load both parts, and
merge adapters with their weights, by the functions here. The base run must still exist at its recorded path, with an
unchanged digest.
"""

import contextlib
import dataclasses
from collections.abc import Callable

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from checkpointing import adapters, manifest, state_names
from checkpointing.bucket import path_of
from checkpointing.checkpoints import CheckpointError, Checkpoints
from checkpointing.record import frozen_refs
from cluster import processes
from configs.base import BUILT_IN_TOKENIZERS, keys_of
from configs.errors import ConfigError, shown
from configs.key import EXECUTION, TRANSFER
from layers.adapters import INPUTS
from settings import loading, stored_config, validation
from settings.architecture import head_dim
from settings.keys import flat


@dataclasses.dataclass(frozen=True)
class SourceRun:
    """A run to load weights from, in a local folder or a bucket; or a recipe, which has shapes only.

    `key` is the configuration key that names it.
    """

    key: str
    name: str

    def configuration(self) -> ConfigDict:
        """Return its configuration. Raises ConfigError if it is missing or invalid."""
        is_recipe = self.name.endswith(".py")
        loaded = loading.load(self.name, "", {}) if is_recipe else stored_config.load_to_read(self.folder(), {})
        try:
            validation.check_keys(loaded.config)
        except ConfigError as error:
            raise ConfigError(f"{self.key}={self.name}: {error}") from None
        return loaded.config

    def folder(self):
        """Return its folder. Raises ConfigError if it is a recipe, which has no weights."""
        if self.name.endswith(".py"):
            raise ConfigError(
                f"{self.key}={self.name} is a recipe and has no weights: it can be rehearsed, not trained"
            )
        return stored_config.run_folder(self.key, self.name, path_of)

    def check_can_initialize(self, config: ConfigDict, tokenizer) -> None:
        """Raise ConfigError if its weights cannot initialize a run of `config` with this tokenizer or None."""
        self.folder()
        may_differ = keys_of(EXECUTION) | keys_of(TRANSFER)
        ours, theirs = (
            dict(model) | {"head_dim": head_dim(model)} for model in (config.model, self.configuration().model)
        )
        if ours["name"] != theirs["name"]:
            raise ConfigError(
                f"model.name={ours['name']} differs from the {theirs['name']} of {self.key}={self.name}; name a run of "
                f"{ours['name']}"
            )
        for key, value in ours.items():
            if value != theirs[key] and f"model.{key}" not in may_differ:
                raise ConfigError(
                    f"model.{key}={value} differs from the {theirs[key]} of {self.key}={self.name}; "
                    f"use that, or all of its model by --config={self.name}"
                )
        if tokenizer:
            self.check_tokenizer(config, tokenizer)
        self.check_has_checkpoint()

    def check_has_checkpoint(self) -> None:
        """Raise ConfigError if it has no checkpoint, before anything that needs it is built."""
        with Checkpoints(self.folder()) as checkpoints:
            if not checkpoints.store.existing():
                raise ConfigError(f"{self.key}={self.name} has no checkpoint; train it first, or name another run")

    def check_tokenizer(self, config: ConfigDict, tokenizer) -> None:
        """Raise ConfigError if the tokenizer of a corpus of `config` differs from the tokenizer of this run.

        `tokenizer.files` maps file names to contents; it is empty for a built-in tokenizer.
        """
        name = self.configuration().data.tokenizer
        if not name and config.data.tokenizer == "sentencepiece":
            raise ConfigError(stored_config.no_tokenizer(self.name))
        if not name:  # imported without one; the user says which it is
            return
        file = path_of(name)
        if name not in BUILT_IN_TOKENIZERS and not file.is_file():
            raise ConfigError(f"{self.key}={self.name} has no tokenizer for texts; name another run")
        built_in = name in BUILT_IN_TOKENIZERS
        same = tokenizer.digest == name if built_in else tokenizer.files.get(file.name) == file.read_bytes()
        if not same:
            raise ConfigError(
                f"{self.key}={self.name} has another tokenizer than data.tokenizer={config.data.tokenizer}; "
                f"use --config.data.tokenizer={name}"
            )

    def checkpoint_ref(self, known: dict | None = None) -> dict:
        """Return a reference to the weights of its newest valid checkpoint: folder, step and digest.

        Args:
          known: an earlier result; then verify and return the reference of that checkpoint, even if there is a newer
            one.

        Raises:
          ConfigError: it has no folder.
          CheckpointError: there is no valid checkpoint, or the known one is missing or has changed.
        """
        folder = self.folder()
        with Checkpoints(folder) as checkpoints:
            step = known["step"] if known else newest_checkpoint(checkpoints, self.configuration())
            problems = checkpoints.problems(step, state_names.WEIGHTS) if known else []
            digest = "" if problems else processes.shared(f"digest {step}", lambda: _digest(checkpoints, step))
        if known and known["digest"] != digest:
            raise CheckpointError(
                f"checkpoint {step} of {self.key}={self.name} {'; '.join(problems[:1]) or 'has other weights'}; "
                "restore the checkpoint that the run started with"
            )
        return {"folder": str(folder if "://" in self.name else folder.absolute()), "step": step, "digest": digest}

    def restore(self, abstract_params: dict, ref: dict | None = None) -> dict:
        """Restore its evaluated parameters in the types and shardings of `abstract_params`.

        `ref` is a result of `checkpoint_ref`; None: the newest checkpoint. Raises the same errors.
        """
        step = (ref or self.checkpoint_ref())["step"]
        with Checkpoints(self.folder()) as checkpoints:
            return restore_eval_params(checkpoints, step, abstract_params)


def initial(config: ConfigDict) -> SourceRun:
    """Return the run that `train.init_from` names, which initializes the parameters of a run of `config`."""
    return SourceRun("train.init_from", config.train.init_from)


def newest_checkpoint(checkpoints: Checkpoints, config: ConfigDict) -> int:
    """Return the step of the newest valid checkpoint of a run with this configuration.

    Raises CheckpointError if there is none, or if it is of another model, even if its arrays have the same shapes.
    """
    step = checkpoints.newest_or_error()
    check_model(checkpoints, step, config)
    return step


def check_model(checkpoints: Checkpoints, step: int, config: ConfigDict) -> None:
    """Raise CheckpointError if a checkpoint is not of the model of a configuration."""
    record, now = checkpoints.record(step), flat(config)
    fixed = record.get("weights_only", now)
    for key, saved in record.get("config", {}).items():
        computes = key.startswith("model.") and key not in keys_of(EXECUTION)
        if computes and key in fixed and now.get(key) != saved:
            raise CheckpointError(
                f"checkpoint {step} of {checkpoints.address} is of a model with {key}={shown(saved)}, but config.json "
                f"there says {shown(now.get(key))}; restore the config.json of that run, record.json has a copy"
            )


def restore_eval_params(checkpoints: Checkpoints, step: int, abstract_params: dict) -> dict:
    """Restore the evaluated parameters of a checkpoint in the shapes and shardings of `abstract_params`.

    Parameters that the run did not train come from its base. Adapters are merged with their base weights. Raises
    CheckpointError if the base weights are missing.
    """
    record, names = checkpoints.record(step), checkpoints.store.arrays(step).keys()
    ref = frozen_refs(record).get("base")
    if not ref:
        return checkpoints.restore_eval_params(step, abstract_params)
    base, wanted = _base(checkpoints, step), flatten_dict(abstract_params)
    if not adapters.among(names):
        root = state_names.eval_part(names)
        own = {path: leaf for path, leaf in wanted.items() if ".".join((root, *path)) in names}
        others = unflatten_dict({path: leaf for path, leaf in wanted.items() if path not in own})
        found = checkpoints.restore_eval_params(step, unflatten_dict(own)) if own else {}
        return unflatten_dict(flatten_dict(found) | flatten_dict(base.restore(others, ref)))
    weights = base.restore(abstract_params, ref)
    parts = checkpoints.restore_eval_params(step, adapters.abstract(abstract_params, record["config"]))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_params)
    merge = jax.jit(adapters.merge, static_argnums=2, donate_argnums=0, out_shardings=shardings)
    return merge(weights, parts, adapters.scale(record["config"]))


@contextlib.contextmanager
def check_complete(checkpoints: Checkpoints, step: int):
    """Raise RunError if the weights that `reader` reads in the block disappear; see `FolderStore.check_complete`."""
    with contextlib.ExitStack() as stores:
        stores.enter_context(checkpoints.store.check_complete(step, state_names.WEIGHTS))
        if ref := frozen_refs(checkpoints.record(step)).get("base"):
            stores.enter_context(check_complete(Checkpoints(path_of(ref["folder"])), ref["step"]))
        yield


def reader(checkpoints: Checkpoints, step: int) -> Callable[[str], Callable]:
    """Return dotted name of a parameter -> (index -> float32 array): `restore_eval_params`, in parts.

    Raises:
      ConfigError: the base weights are in a bucket.
      CheckpointError: the base weights are missing or have changed.
    """
    record, names = checkpoints.record(step), checkpoints.store.arrays(step).keys()
    root = state_names.eval_part(names)

    def own(name: str) -> Callable:
        array = checkpoints.store.open_array(step, f"{root}.{name}")
        return lambda where: array[where].read().result()

    if "base" not in frozen_refs(record):
        return own
    base = _base(checkpoints, step)
    if "://" in base.name:
        raise ConfigError(f"{base.key}={base.name}: copy it from the bucket, and name the copy in train.init_from")
    of_base = reader(Checkpoints(base.folder()), frozen_refs(record)["base"]["step"])
    if not adapters.among(names):
        return lambda name: own(name) if f"{root}.{name}" in names else of_base(name)
    factor = adapters.scale(record["config"])

    def both(name: str) -> Callable:
        path = adapters.adapter_path(tuple(name.split(".")))
        a, b = (".".join((*path, part)) for part in adapters.PARTS)
        if f"{root}.{a}" not in names:
            return of_base(name)
        return adapters.merge_by_index(of_base(name), own(a), own(b), INPUTS[path[-1]], factor)

    return both


def _base(checkpoints: Checkpoints, step: int) -> SourceRun:
    """Return the base run of a checkpoint; its own checkpoint exists and is unchanged.

    Raises CheckpointError if that is missing or has changed, or if the record does not describe the adapters.
    """
    record = checkpoints.record(step)
    stored = record.get("config", {})
    of_lora = stored.get("lora.rank", 0) > 0 and stored.get("lora.alpha", 0) > 0 and stored.get("lora.targets")
    saved = "adapters" if adapters.among(checkpoints.store.arrays(step)) else "what it trained"
    if saved == "adapters" and not of_lora:
        raise CheckpointError(f"{checkpoints.address}: the record of its adapters has no lora.rank, alpha and targets")
    ref = frozen_refs(record)["base"]
    base = SourceRun("train.init_from", ref["folder"])
    try:
        base.checkpoint_ref(ref)
    except (ConfigError, CheckpointError) as error:
        cause = str(error).partition(";")[0]
        raise CheckpointError(
            f"{checkpoints.address} has only {saved}, and the base weights cannot be loaded: {cause}; restore them, "
            "or name their new folder to train.py, --config.train.init_from=FOLDER, and train some more steps"
        ) from None
    return base


def _digest(checkpoints: Checkpoints, step: int) -> str:
    """Return a digest of the evaluated arrays of a checkpoint, the same for the same model imported twice."""
    arrays = checkpoints.store.arrays(step)
    root = f"{state_names.eval_part(arrays)}."
    files = {file: facts for name, files in arrays.items() if name.startswith(root) for file, facts in files.items()}
    return manifest.digest_of(files)
