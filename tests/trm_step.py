# SPDX-License-Identifier: Apache-2.0
"""One real training step of a small recursive model, on any mesh and in any number of microbatches."""

import dataclasses
import functools
import math

import jax
import numpy as np

from configs import base
from core import assembly
from parallelism.mesh import mesh_context
from tests.one_step import placed
from tests.support import random_weights
from tests.trm_cases import small_batch, small_model

ROWS, MAX_STEPS = 16, 3


def small_config(mixer: str = "attention", **mesh):
    """Return a run of slots that halt and explore, of sizes that eight devices divide."""
    config = base.get_config()
    model = small_model(puzzle_dim=24, vocab_size=8, layer_loop="scan", mixer=mixer, num_layers=1, low_cycles=1)
    config.model.update(model)
    config.optimizer.update(
        name="adam_atan2", decayed="all", clip_norm=0.0, ema_decay=0.9, warmup_steps=0, schedule="constant",
        learning_rate=0.01, table_learning_rate=0.1,
    )  # fmt: skip
    config.train.update(objective="recursive", global_batch=ROWS, sequence_length=model.max_length)
    config.supervision.update(max_steps=MAX_STEPS, exploration=0.5)
    config.mesh.update(dict.fromkeys(config.mesh, 1) | mesh)
    return config


def begun(abstract) -> object:
    """Return a state where some slots have halted and others are at work, with weights that do not amplify rounding."""
    rng = np.random.default_rng(1)
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
    params, carry = random_weights(abstract.params, spread=0.15), dict(state.carry) | small_batch(ROWS, seed=1)
    carry["states"] = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), carry["states"])
    carry["halted"], carry["steps"] = rng.random(ROWS) < 0.5, rng.integers(1, MAX_STEPS, ROWS, np.int32)
    carry["draws"] = rng.integers(0, 2**32, carry["draws"].shape, np.uint32)
    return dataclasses.replace(state, params=params, extra=state.extra | {"average": params}, carry=carry)


@functools.cache
def stepped(num_microbatches: int = 1, mixer: str = "attention", **mesh) -> tuple:
    """Return (state, scalars, gradients) of a step on the first devices, always from the same state and batch."""
    config = small_config(mixer, **mesh)
    config.train.gradient_accumulation = num_microbatches
    run = assembly.assemble(config, devices=jax.devices()[: math.prod(mesh.values())])
    with mesh_context(run.mesh):
        state, batch = begun(run.abstract_state), small_batch(ROWS, seed=2)
        return jax.device_get(
            run.train_step_with_grads(placed(state, run.abstract_state), placed(batch, run.abstract_batch))
        )
