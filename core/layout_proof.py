# SPDX-License-Identifier: Apache-2.0
"""Prove a layout: compare the step of a small copy of a run on its mesh with the same step on one device."""

import math

import jax

from configs.base import MESH_AXES, OF_PLAIN_PROOF
from core.assembly import Run, assemble
from parallelism import proof
from parallelism.mesh import mesh_context
from settings import simulation, stored_config


def layout_differences(config) -> list[str]:
    """Return differences between the results of a scaled-down configuration on its mesh and on one device.

    The copy keeps mesh, kinds of layers, remat, scan, microbatches, optimizer and objective. It computes in float32 and
    without dropout, and with the model's own loss instead of one that draws, because random draws depend on the layout,
    or of one that trains a head on frozen weights.
    """
    config = config.copy_and_resolve_references()
    simulation.scale_down(config, {})
    config.model.update(dtype="float32", dropout=0.0)
    stored_config.drop_other_models(config)  # layouts are a property of the model, so its own loss suffices
    if config.train.objective in OF_PLAIN_PROOF:
        config.train.objective = "language_modeling"
    config.batch.update(ramp="none", first=0, noise_scale=False)  # the parts of a batch depend on the layout too
    alone = config.copy_and_resolve_references()
    alone.mesh.update(dict.fromkeys(MESH_AXES, 1))
    alone.train.gradient_accumulation = 1
    one = assemble(alone, devices=jax.devices()[:1])
    many = assemble(config, devices=jax.devices()[: math.prod(config.mesh.values())])
    batches = [jax.device_get(one.objective.random_batch(jax.random.key(seed))) for seed in range(3)]
    reference = _layout(one)
    with mesh_context(one.mesh):
        state = one.init()
        for batch in batches[:2]:  # two steps, so that the moments are more than the first gradient
            placed = jax.device_put((state, batch), (reference.state, reference.batch))
            state, *_ = one.train_step_with_grads(*placed)
    return proof.differences(reference, _layout(many), jax.device_get(state), batches[2])


def _layout(run: Run) -> proof.Layout:
    """Return the step of a run without frozen models, and the shardings of its arguments."""
    state, batch = jax.tree.map(lambda leaf: leaf.sharding, (run.abstract_state, run.abstract_batch))
    return proof.Layout(run.mesh, run.train_step_with_grads, state, batch)
