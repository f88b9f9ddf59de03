# SPDX-License-Identifier: Apache-2.0
"""Exports adapters in the format of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors.

For a weight W [out, in] in that format, lora_A is [rank, in] and lora_B is [out, rank]; (alpha / rank) lora_B lora_A is
added to W.
"""

import json
import pathlib
from collections.abc import Callable

import numpy as np
from tensorstore import TensorStore

from checkpointing import adapters
from checkpointing.checkpoints import Checkpoints
from checkpointing.record import frozen_refs
from checkpointing.source_run import newest_checkpoint
from checkpointing.state_names import WEIGHTS
from configs.errors import ConfigError
from migration import safetensors_files
from migration.hugging_face import NAME, as_published, kept_in, new_folder
from migration.hugging_face_tensors import Tensor
from settings import fine_tuning

FILE, PREFIX = "adapter_model.safetensors", "base_model.model."


def export(run, workdir: pathlib.Path, folder: pathlib.Path) -> int:
    """Write the evaluated adapters of a run's newest checkpoint as a folder; return its step.

    Args:
      run: without adapters, as a stored configuration describes it.

    Raises:
      ConfigError: the run has no adapters, the folder exists already, or no family has such a model.
      CheckpointError: the run has no checkpoint.
    """
    _, tensors, _, _ = as_published(run.config, workdir, run.abstract_state.params)
    with Checkpoints(workdir) as checkpoints:
        step = newest_checkpoint(checkpoints, run.config)
        record, root = checkpoints.record(step), checkpoints.eval_params_part(step)
        if "base" not in frozen_refs(record):
            raise ConfigError(f"{workdir} has no adapters (lora.rank=0); export its weights with --hf={folder}")
        targets = fine_tuning.targets(record["config"]["lora.targets"])
        adapted = [tensor for tensor in tensors if tensor.ours.rpartition(".")[2] in targets]

        def opened(name: str) -> TensorStore:
            return checkpoints.store.open_array(step, f"{root}.{name}")

        with checkpoints.store.check_complete(step, WEIGHTS):
            arrays = {name: array for tensor in adapted for name, array in _parts(opened, tensor).items()}
    written = {name: ("F32", array.shape) for name, array in arrays.items()}
    with new_folder(folder, "peft") as part:
        safetensors_files.write_file(part / FILE, written, lambda name: iter([arrays[name]]))
        names = sorted({tensor.name.split(".")[-2] for tensor in adapted})
        base = _base_name(run.config, workdir, frozen_refs(record)["base"]["step"])
        values = _configuration(record["config"], names, base)
        (part / "adapter_config.json").write_text(json.dumps(values, indent=2) + "\n")
    return step


def _parts(opened: Callable[[str], TensorStore], tensor: Tensor) -> dict[str, np.ndarray]:
    """Return {name: array} of lora_A and lora_B for the tensor of one layer; `opened` returns a parameter's array."""
    name = ".".join(adapters.adapter_path(tuple(tensor.ours.split("."))))
    a, b = (opened(f"{name}.{part}")[tensor.index].read().result() for part in adapters.PARTS)
    rank, theirs = a.shape[-1], PREFIX + tensor.name.removesuffix("weight")
    return {f"{theirs}lora_A.weight": a.reshape(-1, rank).T, f"{theirs}lora_B.weight": b.reshape(rank, -1).T}


def _base_name(config, workdir: pathlib.Path, step: int) -> str:
    """Return what was imported as the base, if its checkpoint of this step is the import, or else its folder.

    Not `_name_or_path` of its config.json, which may be the model that its authors fine-tuned.
    """
    kept = kept_in(config, workdir) if step == 0 else None  # later steps have other weights than the published ones
    return (kept / NAME).read_text() if kept and (kept / NAME).is_file() else config.train.init_from


def _configuration(stored: dict, modules: list[str], base: str) -> dict:
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": stored["lora.rank"], "lora_alpha": stored["lora.alpha"], "target_modules": modules, "lora_dropout": 0.0,
        "bias": "none", "fan_in_fan_out": False, "init_lora_weights": True,
    }  # fmt: skip
