# SPDX-License-Identifier: Apache-2.0
"""The keys of VishwamAI's configurations, and its command: train.py with recipes in YAML, --profile and --wandb."""

import math
import os
import sys
from collections.abc import Mapping

from ml_collections import ConfigDict

from cluster import startup
from configs import base, topologies
from configs.errors import ConfigError
from migration import guides

FILE = "configs/tpu_optimized_config.yaml"
FOLDER, CORES = "checkpoint_dir", "tpu.tpu_cores"  # the folder of the run; the devices that the batch counts with
SWITCHES = {"--profile": "--profile=10:14", "--wandb": "--config.logging.wandb=true"}
KEYS = guides.Keys(
    renamed=guides.COMMON | {
        "model.num_attention_heads": "model.num_heads", "model.num_key_value_heads": "model.num_kv_heads",
        "model.hidden_dropout_prob": "model.dropout", "model.max_position_embeddings": "model.max_length",
        "model.hidden_dim": "model.embed_dim", "model.tie_word_embeddings": "model.tie_embeddings",
        "training.min_lr_ratio": "optimizer.final_fraction", "training.train_steps": "train.steps",
        "training.adam_beta1": "optimizer.beta1", "training.adam_beta2": "optimizer.beta2",
        "training.grad_clip": "optimizer.clip_norm", "training.seed": "train.seed",
        "training.batch_size_increase_step": "batch.increase_step",
        "training.batch_size_increase_factor": "batch.increase_factor",
        "training.error_correction_weight": "error_correction.joint_weight", "data.num_workers": "data.readers",
        "data.val_split": "data.holdout_fraction", "tokenizer.path": "data.tokenizer",
        "tot.search_strategy": "tot.search", "use_tot": "tot.use_tot",
        "use_error_correction": "error_correction.use_error_correction",
    },
    own={
        "training.initial_batch_size": 8, "training.gradient_accumulation_steps": 4, "training.max_batch_size": 32,
        "training.dynamic_batch_size": False, "training.data_parallel": False, "training.model_parallel": False,
        "model.gradient_checkpointing": False, "model.use_flash_attention": True, "model.use_gqa": True, CORES: 8,
    },
    fixed={
        "training.pipeline_parallel": (False, "mesh.fsdp and mesh.model split every layer's weights over the devices"),
        "model.use_alibi": (False, "positions are rotary; model.rope_scaling extends them to longer sequences"),
        "model.use_rope": (True, "decoders encode positions by rotation; see model.rope_theta"),
    },
    noted={
        FOLDER: "",
        "model.use_dualpipe": "layers are not pipelined; collectives overlap with computation under mesh.fsdp",
        "model.use_eplb": "optimizer.bias_step or train.balance_loss balances experts while they are trained",
        "model.use_deepgemm": "XLA compiles matrix products; model.quantization=int8 or fp8 has 8 bits",
        "model.attention_dropout_prob": "attention weights are not dropped; model.dropout drops sublayer outputs",
        "tot.max_depth": "an answer has as many lines as its task needs",
        "tot.beam_width": "a beam keeps tot.max_thoughts partial answers",
        "tot.use_tpu": "a search runs where the model is",
        "tpu.tpu_topology": "JAX reads the topology from the chips; --topology names one to simulate or to rehearse",
        "wandb_project": "set WANDB_PROJECT; --wandb turns Weights & Biases on",
    },
    anywhere=("use_tot", "use_error_correction"),
)  # fmt: skip


def recipe(given: Mapping, source: str = "config") -> ConfigDict:
    """Return the configuration of Torus that a configuration of VishwamAI means; a ConfigError begins with `source`.

    The batch per device times accumulation times `tpu.tpu_cores` is the global batch.
    """
    typed = KEYS.read(given, source)
    read, ours = KEYS.own | typed, KEYS.ours(typed)
    if not read["model.use_gqa"]:
        ours.pop("model.num_kv_heads", None)
    return guides.configured(base.get_config(), _of_several(read, ours) | _batch(read, source) | ours, source)


def cores(given: Mapping, source: str = "config") -> int:
    """Return the number of devices that a configuration counts with."""
    return (KEYS.own | KEYS.read(given, source))[CORES]


def notes(given: Mapping) -> list[str]:
    """Return a line for each key that is not used here but asks for something; it says what is here instead."""
    asked = {key: KEYS.noted.get(key) for key, value in KEYS.dotted(given).items() if value not in (False, 0, None)}
    return [f"Note: {key} is not used here: {instead}\n" for key, instead in asked.items() if instead]


def _of_several(read: dict, ours: dict) -> dict:
    """Return our keys that follow from several of theirs, and from `ours`."""
    found = {"model.num_kv_heads": ours.get("model.num_heads", base.KEYS["model.num_heads"].default)}
    if "model.max_length" in ours:
        found["train.sequence_length"] = ours["model.max_length"]
    if read["model.gradient_checkpointing"]:
        found["model.remat"] = "full"
    if not read["model.use_flash_attention"]:
        found["model.attention"] = "reference"
    if read["training.data_parallel"] or read["training.model_parallel"]:  # two devices share a model
        found |= {"mesh.data": -1, "mesh.fsdp": 1, "mesh.model": 2 if read["training.model_parallel"] else 1}
    if ours.get("error_correction.use_error_correction") and not ours.get("train.init_from"):  # trained with the model
        found |= {"train.objective": "error_correction", "error_correction.joint_weight": 0.4}
    return found


def _batch(read: dict, source: str) -> dict:
    """Return the keys of the batch. In a ramp, microbatches keep their size, and their number grows."""
    first, most = read["training.initial_batch_size"], read["training.max_batch_size"]
    count, cores = read["training.gradient_accumulation_steps"], read[CORES]
    if not read["training.dynamic_batch_size"]:
        return {"train.global_batch": first * count * cores, "train.gradient_accumulation": count}
    if not 1 <= first <= most:
        raise ConfigError(f"{source}: initial_batch_size={first} must lie between 1 and max_batch_size={most}")
    return {
        "train.global_batch": most * count * cores, "batch.ramp": "steps", "batch.first": first * count * cores,
        "train.gradient_accumulation": most * count // math.gcd(most, first),
    }  # fmt: skip


def arguments(typed: list[str]) -> list[str]:
    """Return the arguments of train.py; print a line to stderr for each key that has no counterpart.

    Without an accelerator, `tpu_cores` chips are simulated, of a slice of v4 if there is one, unless another mesh is
    chosen.
    """
    found = [SWITCHES.get(word, word) for word in typed]
    file, _ = guides.take(found, "--config")
    if not file:
        file, found = FILE, [f"--config={FILE}", *found]
    if not file.endswith(guides.SUFFIXES):
        return found
    given = KEYS.dotted(guides.read_file(file, FILE))
    sys.stderr.writelines(notes(given))
    if given.get(FOLDER) and not guides.take(found, "--workdir")[0]:
        found.append(f"--workdir={given[FOLDER]}")
    number = cores(given, file)
    slice_name = topologies.of_size(topologies.get("v4-8"), number)
    is_chosen = guides.take(found, "--topology")[0] or os.environ.get("TPU_MESH_CONFIG")
    if not is_chosen and startup.attached_accelerator() == "cpu":
        if slice_name:
            found.append(f"--topology={slice_name}")
        else:
            os.environ |= {"TPU_MESH_CONFIG": f"1,1,{number}", "TPU_AXIS_NAMES": "data,model,fsdp"}
    return found
