# SPDX-License-Identifier: Apache-2.0
"""Another run that this one builds on, what it is and its weights; and what any run's checkpoint has for weights.

A run with adapters keeps these alone, and in each record which checkpoint of which run they are beside: its `base`.
Whoever reads such a checkpoint to evaluate, to sample or to give out gets both merged, by what is here.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable

import jax
from ml_collections import ConfigDict

from configs import loading, stored_config, validation
from configs.base import ConfigError, shown
from configs.keys import flat
from layers.adapters import INPUTS
from parallelism import processes
from training import adapters, array_files
from training.bucket import path_of
from training.checkpoints import CheckpointError, Checkpoints

# Keys of `model` that say how weights are used, and not what they compute.
USED = ("dtype", "quantization", "attention", "layer_loop", "remat", "dropout", "expert_capacity", "max_length")
# Those on which weights do not depend: these, and how far positions reach, which may be extended.
FREE = (*USED, "rope_theta", "rope_scaling", "rope_factor", "rope_original_length", "local_rope_theta")


@dataclasses.dataclass(frozen=True)
class OtherRun:
    """The folder of a run, here or in a bucket, or a recipe, which has shapes alone; `key` is where it is named."""

    key: str
    name: str

    def configuration(self) -> ConfigDict:
        """Return its configuration; ConfigError where there is none, or one that cannot be."""
        is_recipe = self.name.endswith(".py")
        loaded = loading.load(self.name, "", {}) if is_recipe else stored_config.load_to_read(self.folder(), {})
        try:
            validation.check_keys(loaded.config)
        except ConfigError as error:
            raise ConfigError(f"{self.key}={self.name}: {error}") from None
        return loaded.config

    def folder(self):
        """Return its folder; ConfigError where it is a recipe, which has no weights."""
        if self.name.endswith(".py"):
            raise ConfigError(
                f"{self.key}={self.name} is a recipe, without weights: that can be rehearsed, not trained"
            )
        return stored_config.run_folder(self.key, self.name, path_of)

    def check_begins(self, config: ConfigDict, tokenizer) -> None:
        """Raise ConfigError where a run of `config`, with this tokenizer or None, cannot begin with its weights."""
        self.folder()
        ours, theirs = (
            dict(model) | {"head_dim": model.head_dim or model.embed_dim // model.num_heads}
            for model in (config.model, self.configuration().model)
        )
        for key, value in ours.items():
            if value != theirs[key] and key not in FREE:
                raise ConfigError(
                    f"model.{key}={value} differs from the {theirs[key]} of {self.key}={self.name}; "
                    f"use that, or all of its model by --config={self.name}"
                )
        if tokenizer:
            self.check_tokenizer(config, tokenizer)
        self.check_trained()

    def check_trained(self) -> None:
        """Raise ConfigError where it has no weights, before anything is made that needs them."""
        with Checkpoints(self.folder()) as checkpoints:
            if not checkpoints.files.there():
                raise ConfigError(f"{self.key}={self.name} has no checkpoint; train it first, or name another run")

    def check_tokenizer(self, config: ConfigDict, tokenizer) -> None:
        """Raise ConfigError where the tokenizer of a corpus, that of a run of `config`, is not this run's.

        Its `files` has the content of each of its files by name, none of bytes.
        """
        name = self.configuration().data.tokenizer
        if not name and config.data.tokenizer == "sentencepiece":
            raise ConfigError(stored_config.no_tokenizer(self.name))
        if not name:  # imported without one; the user says which it is
            return
        file = path_of(name)
        if name != "byte" and not file.is_file():
            raise ConfigError(f"{self.key}={self.name} has no tokenizer, by which it could read texts; name another")
        same = not tokenizer.files if name == "byte" else tokenizer.files.get(file.name) == file.read_bytes()
        if not same:
            raise ConfigError(
                f"{self.key}={self.name} has another tokenizer than data.tokenizer={config.data.tokenizer}; "
                f"use --config.data.tokenizer={name}"
            )

    def pin(self, known: dict | None = None) -> dict:
        """Return what says for good which weights its newest good checkpoint has: folder, step and digest.

        Args:
          known: what this returned once; it is then about that checkpoint, whatever is newer.

        Raises:
          ConfigError: it has no folder.
          CheckpointError: there is no good checkpoint, or the known one is gone or has changed.
        """
        folder = self.folder()
        with Checkpoints(folder) as checkpoints:
            step = known["step"] if known else newest_of(checkpoints, self.configuration())
            problems = checkpoints.problems(step) if known else []
            digest = "" if problems else processes.shared(f"digest {step}", lambda: _digest(checkpoints, step))
        if known and known["digest"] != digest:
            raise CheckpointError(
                f"checkpoint {step} of {self.key}={self.name} {'; '.join(problems[:1]) or 'has other weights'}; "
                "bring back the one that the run began with"
            )
        return {"folder": str(folder if "://" in self.name else folder.absolute()), "step": step, "digest": digest}

    def restore(self, abstract_params: dict, pin: dict | None = None) -> dict:
        """Return the parameters that are evaluated of its newest checkpoint, in the types and layouts asked for.

        `pin` says of which, if not the newest. Errors as in that.
        """
        step = (pin or self.pin())["step"]
        with Checkpoints(self.folder()) as checkpoints:
            return restore_evaluated(checkpoints, step, abstract_params)


def initial(config: ConfigDict) -> OtherRun:
    """Return the run that `train.init_from` names, with whose parameters one of `config` begins."""
    return OtherRun("train.init_from", config.train.init_from)


def newest_of(checkpoints: Checkpoints, config: ConfigDict) -> int:
    """Return the step of the newest good checkpoint of a run that has this configuration.

    Raises:
      CheckpointError: there is none, or it is of another model, though its arrays may have the same shapes.
    """
    step = checkpoints.newest_or_error()
    check_model(checkpoints, step, config)
    return step


def check_model(checkpoints: Checkpoints, step: int, config: ConfigDict) -> None:
    """Raise CheckpointError where a checkpoint is of another model than a configuration."""
    record, now = checkpoints.record(step), flat(config)
    fixed = record.get("weights_only", now)
    for key, saved in record.get("config", {}).items():
        computes = key.startswith("model.") and key.removeprefix("model.") not in USED
        if computes and key in fixed and now.get(key) != saved:
            raise CheckpointError(
                f"checkpoint {step} of {checkpoints.address} is of a model with {key}={shown(saved)}, but config.json "
                f"there says {shown(now.get(key))}; bring back the config.json of that run, of which record.json has "
                "a copy"
            )


def restore_evaluated(checkpoints: Checkpoints, step: int, abstract_params: dict) -> dict:
    """Return the parameters of a checkpoint that are evaluated, adapters merged with the weights that they are beside.

    They are in the shapes and layouts of `abstract_params`. Raises CheckpointError where these weights are gone.
    """
    record = checkpoints.record(step)
    if not record.get("base"):
        return checkpoints.restore_evaluated(step, abstract_params)
    weights = _base(checkpoints, record).restore(abstract_params, record["base"])
    parts = checkpoints.restore_evaluated(step, adapters.abstract(abstract_params, record["config"]))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_params)
    merge = jax.jit(adapters.merged, static_argnums=2, donate_argnums=0, out_shardings=shardings)
    return merge(weights, parts, adapters.scale(record["config"]))


def reader(checkpoints: Checkpoints, step: int) -> Callable[[str], Callable]:
    """Return dotted name of a parameter -> (index -> float32 array): what `restore_evaluated` returns, in parts.

    Raises:
      ConfigError: weights that adapters are beside are in a bucket.
      CheckpointError: they are gone, or have changed.
    """
    folder, record = pathlib.Path(checkpoints.files.path) / str(step) / "state", checkpoints.record(step)
    root = checkpoints.evaluated(step)

    def own(name: str) -> Callable:
        array = array_files.opened(folder, f"{root}.{name}")
        return lambda where: array[where].read().result()

    if not record.get("base"):
        return own
    base = _base(checkpoints, record)
    if "://" in base.name:
        raise ConfigError(f"{base.key}={base.name}: copy it from the bucket, and have the run begin from the copy")
    of_base, factor = reader(Checkpoints(base.folder()), record["base"]["step"]), adapters.scale(record["config"])

    def both(name: str) -> Callable:
        path = adapters.path_of(tuple(name.split(".")))
        a, b = (".".join((*path, part)) for part in adapters.PARTS)
        if not (folder / f"{root}.{a}").exists():
            return of_base(name)
        return adapters.merged_in_parts(of_base(name), own(a), own(b), INPUTS[path[-1]], factor)

    return both


def _base(checkpoints: Checkpoints, record: dict) -> OtherRun:
    """Return the run that adapters are beside, its checkpoint being there as it was.

    Raises:
      CheckpointError: it is not, or the record does not say what the adapters are.
    """
    stored = record.get("config", {})
    if not (stored.get("lora.rank", 0) > 0 and stored.get("lora.alpha", 0) > 0 and stored.get("lora.targets")):
        raise CheckpointError(f"{checkpoints.address}: the record of its adapters has no lora.rank, alpha and targets")
    base = OtherRun("train.init_from", record["base"]["folder"])
    try:
        base.pin(record["base"])
    except (ConfigError, CheckpointError) as error:
        cause = str(error).partition(";")[0]
        raise CheckpointError(
            f"{checkpoints.address} has adapters alone, and not what they are beside: {cause}; bring that back"
        ) from None
    return base


def _digest(checkpoints: Checkpoints, step: int) -> str:
    """Return a digest of the evaluated arrays of a checkpoint, the same for the same model imported twice."""
    files, root = checkpoints.files.manifest(step)["files"], checkpoints.evaluated(step)
    arrays = {name: facts for name, facts in files.items() if name.startswith(f"state/{root}.")}
    return hashlib.sha256(json.dumps(arrays, sort_keys=True).encode()).hexdigest()
