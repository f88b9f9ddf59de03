# SPDX-License-Identifier: Apache-2.0
"""Scales a recipe down so that a topology's mesh can be simulated on a machine without accelerator.

Only sizes shrink, to values that the mesh still divides. The mesh, the axes, the kinds of layers, remat, scan,
optimizer, objective and data stay. Typed values take precedence. The length of the run counts as a size. Only the batch
may grow, to one sequence per shard.
"""

import math

from ml_collections import ConfigDict

from configs.base import batch_shards
from configs.errors import ConfigError
from settings import layouts
from settings.architecture import multiples_text
from settings.keys import LENGTHS, flat
from settings.together import WITHOUT_TEXT

TARGETS = {  # largest value of each key in a simulation
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 16,
    "model.embed_dim": 64,
    "model.mlp_dim": 128,
    "model.num_experts": 4,
    "model.experts_per_token": 2,
    "model.shared_experts": 1,
    "model.vocab_size": 512,
    "model.sliding_window": 32,
    "train.sequence_length": 64,
    "train.global_batch": 16,
    "train.steps": 200,
    "optimizer.warmup_steps": 20,
    "train.eval_every": 100,
    "train.save_every": 100,
    "evaluation.chunk_tokens": 16,
}
ROUNDED = ("train.global_batch", "batch.first")  # rounded up to a multiple that the mesh divides, unless typed
OF_A_RAMP = {"batch.first": 8, "batch.increase_step": 40}
OF_PUZZLES = {  # additional keys of a recursive model; the number of cells of a puzzle cannot change
    "model.high_cycles": 2,
    "model.low_cycles": 2,
    "model.gradient_cycles": 2,
    "supervision.max_steps": 4,
    "data.puzzle_count": 100,
    "data.puzzle_augmentations": 10,
    "data.puzzle_heldout": 100,
    "inference.trajectories": 4,
    "inference.supervision_steps": 4,
    "inference.puzzles": 100,
}


def scale_down(config: ConfigDict, typed: dict[str, object]) -> dict[str, tuple]:
    """Scale `config` down in place; return {key: (old, new)} of the changed keys.

    Raises ConfigError if the mesh does not divide a size of the recipe, or a typed one.
    """
    before = flat(config)
    units = _units(config)
    for key, unit in units.items():
        if before[key] % unit and (key in typed or key not in ROUNDED):
            fitting = multiples_text(before[key], unit)
            who = "the mesh and train.gradient_accumulation need" if key in ROUNDED else _who_needs(key, config)
            raise ConfigError(f"{key}={before[key]} is not a multiple of {unit}, which {who}; use {fitting}")
    targets = TARGETS | {"model.num_layers": max(TARGETS["model.num_layers"], config.model.global_every)}
    if config.train.objective in WITHOUT_TEXT:  # the length is that of an input, a task or a puzzle
        targets = {key: target for key, target in targets.items() if key != "train.sequence_length"}
    if config.model.name == "trm":
        targets |= OF_PUZZLES
    if config.batch.ramp != "none":
        targets |= OF_A_RAMP
    for key, target in targets.items():
        unit = units.get(key, 1)
        if key not in typed and before[key]:  # 0 means derived or off
            # If the recipe fits the mesh, every key except the batch is already a multiple of its unit.
            config.update_from_flattened_dict({key: math.ceil(min(before[key], target) / unit) * unit})
    if not typed.keys() & set(LENGTHS):
        config.train.update(steps=min(before["train.steps"] or math.inf, TARGETS["train.steps"]), tokens=0, epochs=0.0)
        config.evaluation.every_epochs = 0.0
    _keep_group_size(config, before, typed)
    after = flat(config)
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def _who_needs(key: str, config: ConfigDict) -> str:
    """Return the mesh axes that split the size of a key, with their sizes and a verb."""
    splitting = [axis for together in _axes(config).get(key, ()) for axis in together]
    axes = [f"mesh.{axis}={config.mesh[axis]}" for axis in splitting if config.mesh[axis] > 1]
    return f"{' and '.join(axes)} need{'s' * (len(axes) == 1)}" if axes else "a mesh of the run needs"


def _units(config: ConfigDict) -> dict[str, int]:
    """Return {key: the unit that the size must be a multiple of on every mesh of the run}."""
    of_meshes = [_units_on(on_mesh) for on_mesh in layouts.on_each_mesh(config).values()]
    return {key: math.lcm(*(units[key] for units in of_meshes)) for key in of_meshes[0]}


def _units_on(config: ConfigDict) -> dict[str, int]:
    """Return `_units` for `config.mesh`, from the axis rules and the number of microbatches."""
    mesh, microbatches = config.mesh, max(1, config.train.gradient_accumulation)
    of_axes = {
        key: math.lcm(*(math.prod(mesh[axis] for axis in together) for together in several))
        for key, several in _axes(config).items()
    }
    return of_axes | {
        "model.low_cycles": max(1, config.model.low_latents),
        "train.global_batch": batch_shards(mesh) * microbatches,
        "batch.first": batch_shards(mesh) * microbatches,
    }


def _axes(config: ConfigDict) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return {key: groups of mesh axes}; an array of the key's size is split by all axes of a group together."""
    model, of_experts = ("model",), (("fsdp", "context"),) if config.model.num_experts else ()
    return {
        "model.num_heads": (model,),
        "model.num_kv_heads": (model,),
        "model.embed_dim": (("fsdp", "context", "expert"),),
        "model.mlp_dim": (model, *of_experts),
        "model.num_experts": (("expert", "model"),),
        "model.vocab_size": (model,),
        "train.sequence_length": (("context",),),
    }


def _keep_group_size(config: ConfigDict, before: dict, typed: dict) -> None:
    """Keep multi-head attention multi-head, and grouped-query attention grouped."""
    model = config.model
    if before["model.num_heads"] == before["model.num_kv_heads"] and "model.num_kv_heads" not in typed:
        model.num_kv_heads = model.num_heads
    elif model.num_heads == model.num_kv_heads and not {"model.num_heads", "model.num_kv_heads"} & typed.keys():
        model.num_heads = 2 * model.num_kv_heads
    if not model.head_dim and "model.embed_dim" not in typed:
        unit = math.lcm(_units(config)["model.embed_dim"], 2 * model.num_heads)
        model.embed_dim = math.ceil(model.embed_dim / unit) * unit
