# SPDX-License-Identifier: Apache-2.0
"""Batches that an objective samples from the live parameters before each step."""

import jax
import jax.numpy as jnp
import numpy as np

from core import assembly, decoding
from core.assembly import Run
from core.evaluators import engine_of
from objectives.objective import Objective, Sampled
from parallelism import resharding
from parallelism.mesh import mesh_context
from parallelism.placement import check_batch, of_rows
from settings.decoding import for_decoding


def samples(objective: Objective) -> bool:
    """Return whether an objective samples batches; asking it would cost others a dispatch in each step."""
    return type(objective).sample_batch is not Objective.sample_batch


class BatchSampler:
    """Samples batches. Weights are copied to the mesh and the layout in which a token is decoded fastest."""

    def __init__(self):
        self._run = None

    def sample(self, run: Run, params: dict, frozen: dict, batch: dict[str, jax.Array], step: int) -> Sampled:
        """Return what the objective of `run` samples in place of `batch`, with its arrays on the devices.

        Raises ValueError if the sampled batch has other names, shapes or types than `objective.batch()`.
        """
        if run is not self._run:
            self._begin(run)
        weights = self._copied(run.models.merge_base(params, frozen))
        with mesh_context(self._decoding.mesh):
            key = jax.random.fold_in(jax.random.key(run.config.train.seed), step)
            sampled = run.objective.sample_batch(engine_of(self._decoding, weights), batch, key)
        return Sampled(batch) if sampled is None else sampled._replace(batch=_checked(run, sampled.batch, batch))

    def _copied(self, params: dict) -> dict:
        """Return a copy of parameters for decoding. A second one, of which it is made, is freed on return."""
        moved = resharding.reshard(self._copy(params), self._weights)
        with mesh_context(self._decoding.mesh):
            return self._place(moved)

    def _begin(self, run: Run) -> None:
        """Prepare to decode with the parameters of a run."""
        devices = run.mesh.devices.flatten().tolist()
        self._run, self._decoding = run, assembly.assemble(for_decoding(run.config, len(devices)), devices=devices)
        with mesh_context(self._decoding.mesh):
            self._place, self._weights = decoding.placer(self._decoding), decoding.stacked_weights(self._decoding)
        types = jax.tree.map(lambda weight: weight.dtype, self._weights)
        self._copy = jax.jit(lambda params: jax.tree.map(lambda one, of: jnp.copy(one.astype(of)), params, types))


def _checked(run: Run, sampled: dict, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return a sampled batch on the devices, sharded as the step wants it."""
    wanted, what = of_rows(run.abstract_batch, len(batch["tokens"])), f"train.objective={run.config.train.objective}"
    check_batch(sampled, wanted, f"the batch that {what} sampled")
    return {name: _placed(sampled[name], array.sharding) for name, array in run.abstract_batch.items()}


def _placed(values, sharding: jax.sharding.Sharding) -> jax.Array:
    """Return values that all processes have as an array on all devices."""
    host = np.asarray(values)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
