# SPDX-License-Identifier: Apache-2.0
"""Proves a layout: a step on a mesh computes what it computes on one device, for a small copy of a run.

Both steps start from the same state and the same batch. Their results are compared array by array, by the error in the
L2 norm: the scalars, every gradient, the update, and the rest of the state.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import numpy as np
from ml_collections import ConfigDict

from cluster.hub import RunError
from configs.base import MESH_AXES, OF_A_MODULE
from configs.errors import ConfigError
from core.assembly import Run, assemble
from parallelism.mesh import mesh_context
from settings import simulation, stored_config
from settings.keys import flat
from training.optimizers import path_of_weight
from training.state import dotted

# Float32 sums in another order differ by about 1e-6. The limit for an update is wider: an update is a small difference
# of rounded weights, and Adam turns the rounding error of a gradient near 0 into a step. A wrong layout causes an error
# of the order of the value itself, not of a thousandth.
LIMITS = {"forward": 1e-5, "gradient": 1e-5, "update": 1e-3, "state": 1e-5}
# A loss may be near 0 because its terms cancel, as GRPO's is. Its error is then that of the terms, which are about 1.
SCALE = {"forward": 1.0}
# The terms of a gradient may cancel, such as those of a bias that all distances share. Only their rounding error is
# left then, and an optimizer may turn it into a full step. So if the norm of a weight's gradient is below this share of
# the norm of all gradients, the limits for its gradient, update and moments are wider by the same factor.
SMALL_SHARE = 0.1
MOST_PUZZLES = 1024  # of ARC's million, whose embeddings would be held several times
LEFT_OUT = ("train.objective", "lora.rank", "grpo.kl", "model.quantization", "model.expert_capacity", "model.dropout")
BY_PLAIN_LOSS = (*OF_A_MODULE, "meta_language_modeling")  # objectives proved by the loss of a language model


@dataclasses.dataclass(frozen=True)
class Layout:
    """A step on a mesh.

    Attributes:
      step: (state, batch) -> (state, scalars, gradients), run inside `mesh_context(mesh)`; the state is a dataclass
        with `params`.
      state, batch: trees of shardings with the structure of the step's arguments.
    """

    mesh: jax.sharding.Mesh
    step: Callable
    state: object
    batch: object


def small_copy(config) -> ConfigDict:
    """Return a scaled-down copy of a configuration, whose step computes the same on every mesh, up to rounding.

    It keeps mesh, kinds of layers, remat, microbatches, optimizer and, if possible, the objective. It scans over layers
    unless the configuration says otherwise, as a TPU would. It computes in float32, and without what depends on the
    layout by design: dropout, quantized products, and tokens that experts drop. It has the model's own loss instead of
    one that draws or takes each device's first rows for tasks, or of one that reads frozen weights.
    """
    config = config.copy_and_resolve_references()
    simulation.scale_down(config, {})
    config.model.update(
        dtype="float32", dropout=0.0, quantization="none", num_puzzles=min(config.model.num_puzzles, MOST_PUZZLES)
    )
    if config.model.expert_capacity:
        config.model.expert_capacity = float(config.model.num_experts)  # room for all tokens
    if config.model.layer_loop == "auto":
        config.model.layer_loop = "scan"
    stored_config.drop_other_models(config)  # layouts are a property of the model, so its own loss suffices
    if config.train.objective in BY_PLAIN_LOSS:
        config.train.objective = "language_modeling"
    config.batch.update(ramp="none", first=0, noise_scale=False)  # the parts of a batch depend on the layout too
    return config


def not_proved(config) -> list[str]:
    """Return the settings, such as lora.rank=8, that `small_copy` leaves out, so that a proof says nothing of them."""
    before, after = flat(config), flat(small_copy(config))
    return [f"{key}={before[key]}" for key in LEFT_OUT if before[key] != after[key]]


def layout_differences(config) -> list[str]:
    """Return differences between the results of the small copy of a configuration on its mesh and on one device.

    Raises ConfigError for an objective of one's own that reads frozen weights, and RunError as `differences`.
    One device has no microbatches, except of experts, whose loads are balanced and reported for each microbatch.
    """
    config = small_copy(config)
    alone = config.copy_and_resolve_references()
    alone.mesh.update(dict.fromkeys(MESH_AXES, 1))
    if not config.model.num_experts:
        alone.train.gradient_accumulation = 1
    one = assemble(alone, devices=jax.devices()[:1])
    if jax.tree.leaves(one.abstract_frozen):
        raise ConfigError(
            f"train.objective={config.train.objective} reads frozen weights, which a small copy of a run does not have"
        )
    many = assemble(config, devices=jax.devices()[: math.prod(config.mesh.values())])
    batches = [jax.device_get(one.objective.random_batch(jax.random.key(seed))) for seed in range(3)]
    reference = _layout(one)
    with mesh_context(one.mesh):
        state = one.init()
        for batch in batches[:2]:  # two steps, so that the moments are more than the first gradient
            placed = jax.device_put((state, batch), (reference.state, reference.batch))
            state, *_ = one.train_step_with_grads(*placed)
    return differences(reference, _layout(many), jax.device_get(state), batches[2])


def _layout(run: Run) -> Layout:
    """Return the step of a run without frozen models, and the shardings of its arguments."""
    state, batch = jax.tree.map(lambda leaf: leaf.sharding, (run.abstract_state, run.abstract_batch))
    return Layout(run.mesh, run.train_step_with_grads, state, batch)


def differences(reference: Layout, candidate: Layout, state, batch) -> list[str]:
    """Return a line for each array in which the candidate differs from the reference; empty if both agree.

    `state` and `batch` are host arrays of the global shapes. Raises RunError if the reference is not finite.
    """
    wanted, got = (_observe(layout, state, batch) for layout in (reference, candidate))
    for part, tree in wanted.items():
        for path, leaf in _leaves(tree):
            if not np.isfinite(leaf).all():
                name = _name(part, path)
                raise RunError(f"{name} is not finite on one device either, so nothing can be compared with it")
    norms = {tuple(key.key for key in path): np.linalg.norm(leaf) for path, leaf in _leaves(wanted["gradient"])}
    small = SMALL_SHARE * np.linalg.norm(list(norms.values()))
    wider = {path: max(1.0, small / max(norm, 1e-30)) for path, norm in norms.items()}
    lines = []
    for part, limit in LIMITS.items():
        if (found := jax.tree.structure(got[part])) != (expected := jax.tree.structure(wanted[part])):
            lines.append(f"{part}: {found} in place of {expected}")
            continue
        for (path, expected), actual in zip(_leaves(wanted[part]), jax.tree.leaves(got[part]), strict=True):
            error = relative_error(actual, expected, SCALE.get(part, 0.0))
            of_array = limit * wider.get(path_of_weight(path, wider), 1.0)
            if not error <= of_array:
                lines.append(f"{_name(part, path)}: relative error {error:.1e}, limit {of_array:.0e}")
    return lines


def _name(part: str, path: tuple) -> str:
    return f"{part} {dotted(path)}"


def _leaves(tree) -> list[tuple]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def relative_error(actual, expected, least: float = 0.0) -> float:
    """Return |actual - expected| / max(|expected|, least) in the L2 norm.

    It is infinite if shapes differ or `actual` is not finite.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return np.inf
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), least, 1e-30))


def _observe(layout: Layout, state, batch) -> dict:
    """Run one step from host arrays and return its results as host arrays, by the keys of LIMITS."""
    placed = jax.device_put((state, batch), (layout.state, layout.batch))
    with mesh_context(layout.mesh):
        after, scalars, gradients = jax.tree.map(_agreed, layout.step(*placed))
    update = jax.tree.map(lambda new, old: np.float64(new) - old, after.params, state.params)
    state = dataclasses.replace(after, params={})  # leaves counts, moments, an average, a carry
    return {"forward": scalars, "gradient": gradients, "update": update, "state": state}


def _agreed(array: jax.Array) -> np.ndarray:
    """Return the array on the host, with NaN wherever the replicas on different devices disagree."""
    whole = np.array(array, np.float64)
    for shard in array.addressable_shards:
        if not np.array_equal(shard.data, whole[shard.index]):
            whole[shard.index] = np.nan
    return whole
