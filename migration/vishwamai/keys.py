# SPDX-License-Identifier: Apache-2.0
"""The keys of VishwamAI's configurations, YAML files or dictionaries, and the configuration of Torus that they mean.

Keys are dotted here: `training.max_steps`. A key of configs/base.py that has the same meaning keeps its name.
"""

import math
import pathlib
from collections.abc import Mapping

from ml_collections import ConfigDict

from configs import base
from configs.errors import ConfigError, did_you_mean, shown, similar
from migration import yaml_file
from settings import validation
from settings.keys import parse_value

SUFFIXES = (".yaml", ".yml")
CORES = 8  # devices that the guide's batch counts with
RENAMED = {
    "model.hidden_size": "model.embed_dim", "model.num_attention_heads": "model.num_heads",
    "model.num_key_value_heads": "model.num_kv_heads", "model.intermediate_size": "model.mlp_dim",
    "model.hidden_dropout_prob": "model.dropout", "model.max_position_embeddings": "model.max_length",
    "model.tie_word_embeddings": "model.tie_embeddings", "training.learning_rate": "optimizer.learning_rate",
    "training.min_lr_ratio": "optimizer.final_fraction", "training.warmup_steps": "optimizer.warmup_steps",
    "training.max_steps": "train.steps", "training.train_steps": "train.steps",
    "training.weight_decay": "optimizer.weight_decay", "training.adam_beta1": "optimizer.beta1",
    "training.adam_beta2": "optimizer.beta2", "training.grad_clip": "optimizer.clip_norm",
    "training.log_every": "train.log_every", "training.eval_every": "train.eval_every",
    "training.save_every": "train.save_every", "training.seed": "train.seed",
    "training.batch_size_increase_step": "batch.increase_step",
    "training.batch_size_increase_factor": "batch.increase_factor",
    "training.error_correction_weight": "error_correction.joint_weight", "data.num_workers": "data.readers",
    "data.val_split": "data.holdout_fraction", "tokenizer.path": "data.tokenizer",
    "tot.search_strategy": "tot.search", "use_tot": "tot.use_tot",
    "use_error_correction": "error_correction.use_error_correction",
}  # fmt: skip
DEFAULTS = {  # of keys that several of ours depend on
    "training.initial_batch_size": 8, "training.gradient_accumulation_steps": 4, "training.dynamic_batch_size": False,
    "training.max_batch_size": 32, "training.data_parallel": False, "training.model_parallel": False,
    "tpu.tpu_cores": CORES, "model.gradient_checkpointing": False, "model.use_flash_attention": True,
    "model.use_gqa": True,
}  # fmt: skip
REFUSED = {  # (value that is supported, what is here instead)
    "training.pipeline_parallel": (False, "mesh.fsdp and mesh.model split every layer's weights over the devices"),
    "model.use_alibi": (False, "positions are rotary; model.rope_scaling extends them to longer sequences"),
    "model.use_rope": (True, "decoders encode positions by rotation; see model.rope_theta"),
}
NOTED = {  # what is here instead, where a key asks for something
    "model.use_dualpipe": "layers are not pipelined; collectives overlap with computation under mesh.fsdp",
    "model.use_eplb": "optimizer.bias_step or train.balance_loss balances experts while they are trained",
    "model.use_deepgemm": "XLA compiles matrix products; model.quantization=int8 or fp8 has 8 bits",
    "model.attention_dropout_prob": "attention weights are not dropped; model.dropout drops parts of sublayer outputs",
    "tot.max_depth": "an answer has as many lines as its task needs",
    "tot.beam_width": "a beam keeps tot.max_thoughts partial answers",
    "tot.use_tpu": "a search runs where the model is",
    "tpu.tpu_topology": "JAX reads the topology from the chips; --topology names one to simulate or to rehearse",
    "wandb_project": "set WANDB_PROJECT; --wandb turns Weights & Biases on",
}
FOLDER = "checkpoint_dir"  # the folder of the run
SWITCHES = ("use_tot", "use_error_correction")  # in any section
KNOWN = {FOLDER, *RENAMED, *DEFAULTS, *REFUSED, *NOTED, *base.KEYS}
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def read_yaml(file: pathlib.Path) -> dict:
    """Return the content of a YAML file; ConfigError if it cannot be read, or is not a mapping, or has aliases."""
    content = yaml_file.read(file, str(file))
    if not isinstance(content, dict):
        raise ConfigError(f"{file} has no sections; write model:, training: and so on, as in the shipped file")
    return content


def recipe(given: Mapping, source: str = "config") -> ConfigDict:
    """Return the configuration of Torus that a configuration of VishwamAI means; `source` begins error messages.

    The batch per device times accumulation times `tpu.tpu_cores` is the global batch.

    Raises:
      ConfigError: a key is unknown or not supported, or a value is of the wrong type or inconsistent.
    """
    values = dotted(given)
    typed = {key: _checked(key, value, source) for key, value in values.items()}
    read = DEFAULTS | typed
    ours = {RENAMED.get(key, key): value for key, value in typed.items() if RENAMED.get(key, key) in base.KEYS}
    ours = _batch(read, source) | _mesh(read) | _objective(ours) | ours | _model(read, ours)
    config = base.get_config()
    config.update_from_flattened_dict(ours)
    try:
        validation.check_keys(config)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return config


def cores(given: Mapping, source: str = "config") -> int:
    """Return the number of devices that a configuration counts with."""
    key = "tpu.tpu_cores"
    return _checked(key, dotted(given).get(key, CORES), source)


def notes(given: Mapping) -> list[str]:
    """Return a line for each key that asks for something that is otherwise here."""
    asked = [key for key, value in dotted(given).items() if key in NOTED and value not in (False, 0, None)]
    return [f"Note: {key} is not used here: {NOTED[key]}\n" for key in asked]


def dotted(given: Mapping, prefix: str = "") -> dict[str, object]:
    """Return {dotted key: value}; the switches lose their section."""
    found = {}
    for key, value in given.items():
        name = str(key) if key in SWITCHES else f"{prefix}{key}"
        found |= dotted(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return found


def _checked(key: str, value: object, source: str) -> object:
    """Return a value of the type of its key. PyYAML reads 1e-4 as a text."""
    if key not in KNOWN:
        leaf = {name.rpartition(".")[2]: name for name in KNOWN}
        near = similar(key, KNOWN) or [leaf[name] for name in similar(key.rpartition(".")[2], leaf)]
        raise ConfigError(f"{source}: {shown(key)} is not a key{did_you_mean(near)}")
    if key in REFUSED and value != REFUSED[key][0]:
        raise ConfigError(f"{source}: {key}={shown(value)} is not supported: {REFUSED[key][1]}")
    if key in REFUSED or key in NOTED or key == FOLDER:
        return value
    name = RENAMED.get(key, key)
    default = DEFAULTS[key] if key in DEFAULTS else base.KEYS[name].default
    try:
        if value is None or isinstance(value, list):
            raise ConfigError("")
        return parse_value(name, str(value), {name: default})
    except ConfigError:
        raise ConfigError(f"{source}: {key}={shown(value)} is not {KINDS[type(default)]}") from None


def _model(read: dict, ours: dict) -> dict:
    heads = ours.get("model.num_heads", base.KEYS["model.num_heads"].default)
    grouped = read["model.use_gqa"] and "model.num_kv_heads" in ours
    found = {"model.num_kv_heads": ours["model.num_kv_heads"] if grouped else heads}
    if "model.max_length" in ours:
        found["train.sequence_length"] = ours.get("train.sequence_length", ours["model.max_length"])
    if read["model.gradient_checkpointing"]:
        found["model.remat"] = "full"
    if not read["model.use_flash_attention"]:
        found["model.attention"] = "reference"
    return found


def _batch(read: dict, source: str) -> dict:
    """Return the keys of the batch. In a ramp, microbatches stay as large as the first ones, and become more."""
    first, most = read["training.initial_batch_size"], read["training.max_batch_size"]
    count, cores = read["training.gradient_accumulation_steps"], read["tpu.tpu_cores"]
    if min(first, most, count, cores) < 1:
        raise ConfigError(f"{source}: batch sizes, accumulation steps and tpu_cores must be at least 1")
    if not read["training.dynamic_batch_size"]:
        return {"train.global_batch": first * count * cores, "train.gradient_accumulation": count}
    if most < first:
        raise ConfigError(f"{source}: training.max_batch_size={most} is below training.initial_batch_size={first}")
    return {
        "train.global_batch": most * count * cores, "batch.ramp": "steps", "batch.first": first * count * cores,
        "train.gradient_accumulation": most * count // math.gcd(most, first),
    }  # fmt: skip


def _mesh(read: dict) -> dict:
    """Return the mesh of data_parallel and model_parallel: two devices share a model, the others share the batch."""
    if not (read["training.data_parallel"] or read["training.model_parallel"]):
        return {}
    model = 2 if read["training.model_parallel"] else 1
    return {"mesh.data": -1, "mesh.fsdp": 1, "mesh.model": model}


def _objective(ours: dict) -> dict:
    """Return the keys that train a module of error correction together with the model."""
    if not ours.get("error_correction.use_error_correction") or ours.get("train.init_from"):
        return {}
    return {"train.objective": "error_correction", "error_correction.joint_weight": 0.4}
