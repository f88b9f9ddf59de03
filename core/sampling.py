# SPDX-License-Identifier: Apache-2.0
"""Batches that an objective samples from the live parameters before each step."""

import jax
import numpy as np

from core.assembly import Run
from core.evaluators import engine_of
from objectives.objective import Objective, Sampled
from parallelism.placement import check_batch, of_rows


def samples(objective: Objective) -> bool:
    """Return whether an objective samples batches; asking it would cost others a dispatch in each step."""
    return type(objective).sample_batch is not Objective.sample_batch


def sample(run: Run, params: dict, frozen: dict, batch: dict[str, jax.Array], step: int) -> Sampled:
    """Return what the objective samples in place of `batch`, with its arrays on the devices.

    Raises ValueError if the sampled batch has other names, shapes or types than `objective.batch()`.
    """
    engine = engine_of(run, run.models.merge_base(params, frozen))
    key = jax.random.fold_in(jax.random.key(run.config.train.seed), step)
    sampled = run.objective.sample_batch(engine, batch, key)
    if sampled is None:
        return Sampled(batch)
    wanted, what = of_rows(run.abstract_batch, len(batch["tokens"])), f"train.objective={run.config.train.objective}"
    check_batch(sampled.batch, wanted, f"the batch that {what} sampled")
    placed = {name: _placed(sampled.batch[name], array.sharding) for name, array in run.abstract_batch.items()}
    return sampled._replace(batch=placed)


def _placed(values, sharding: jax.sharding.Sharding) -> jax.Array:
    """Return values that all processes have as an array on all devices."""
    host = np.asarray(values)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
