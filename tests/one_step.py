# SPDX-License-Identifier: Apache-2.0
"""One real training step of a small decoder, on any mesh and in any number of microbatches, its gradients kept."""

import dataclasses
import functools
import math

import jax
import numpy as np

from configs import base
from core import assembly
from parallelism.mesh import mesh_context
from tests.support import packed_batch, random_weights

BATCH, LENGTH, VOCAB = 16, 24, 68


def small_config(**mesh):
    """Return a run whose sizes many meshes of 8 divide, and and which differ from each other where possible."""
    config = base.get_config()
    config.model.update(
        num_layers=2, embed_dim=40, num_heads=8, num_kv_heads=4, head_dim=6, mlp_dim=56, vocab_size=VOCAB,
        max_length=LENGTH, dtype="float32", layer_loop="scan",
    )  # fmt: skip
    config.train.update(global_batch=BATCH, sequence_length=LENGTH, z_loss=0.01, loss_chunk_tokens=128)
    config.mesh.update(dict.fromkeys(config.mesh, 1) | mesh)
    return config


def simply_updated(config) -> None:
    """Have a run update in the fewest operations, since each is compiled, where the gradient is the subject."""
    config.optimizer.update(name="sgd", schedule="constant", clip_norm=0.0, weight_decay=0.0)


def batch() -> dict:
    """Return documents of many lengths, so that no two devices and no two microbatches hold as many real tokens."""
    rng = np.random.default_rng(0)
    return packed_batch([[int(n) for n in rng.integers(1, 9, 3)] for _ in range(BATCH)], LENGTH, VOCAB)


def placed(tree, abstract):
    """Put host arrays where the abstract ones lie."""
    return jax.tree.map(lambda value, leaf: jax.device_put(value, leaf.sharding), tree, abstract)


def initial_state(run, spread: float = 0.3):
    """Return a state with random weights, always the same, and zeros else, without a program to make it."""
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), run.abstract_state)
    state = dataclasses.replace(state, params=random_weights(state.params, spread=spread))
    return placed(state, run.abstract_state)


@functools.cache
def gradients_and_scalars(
    num_microbatches: int = 1, of_model: tuple = (), sum_dtype: str = "auto", spread: float = 0.3, **mesh
):  # fmt: skip
    """Return what one step computes on the first devices, always from the same weights and batch.

    Args:
      of_model: pairs of keys of its section and values.
      spread: of the weights.
    """
    config = small_config(**mesh)
    config.model.update(dict(of_model))
    config.train.update(gradient_accumulation=num_microbatches, sum_dtype=sum_dtype)
    simply_updated(config)
    run = assembly.assemble(config, devices=jax.devices()[: math.prod(mesh.values())])
    state = initial_state(run, spread)
    with mesh_context(run.mesh):
        _, scalars, gradients = run.train_step_with_grads(state, placed(batch(), run.abstract_batch))
    return jax.device_get((gradients, scalars))
