# SPDX-License-Identifier: Apache-2.0
"""The effective rank of hidden units: the number of directions that their activations use.

It is exp(-sum_i p_i ln p_i) with p_i = s_i / sum_j s_j, for the singular values s of the matrix [tokens, units] (Roy
and Vetterli, "The effective rank", EUSIPCO 2007).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from core.assembly import Run
from core.evaluation import heldout_batches
from core.evaluators import Evaluator
from input_pipeline.corpus import Corpus
from layers import taps

KIND = "plasticity"
TOKENS = 512  # of a batch, at most; the rank cannot exceed it
HIDDEN, OUTPUT = "mlp_hidden", "mlp"  # taps: of hidden units, and where there are only experts, of what they add


def make(config, corpus: Corpus | None) -> Evaluator | None:
    """Return the evaluator if `plasticity.measure` asks for it; a run without a corpus has no held-out rows."""
    return EffectiveRank(config.plasticity.measure) if corpus is not None and config.plasticity.measure else None


class EffectiveRank(Evaluator):
    """The effective rank of the hidden units of each layer on a held-out batch."""

    name = KIND

    def __init__(self, every: int):
        self.every = every
        self._run = self._triangles = None  # the last run, and the program that is compiled for it

    def evaluate(self, context):
        """Return `effective_rank`, the mean over layers, and `smallest_effective_rank`; padding counts too."""
        if context.stop():
            return None
        batch = next(heldout_batches(context.run, context.corpus, 1, context.on_lost))
        if context.run is not self._run:
            self._run, self._triangles = context.run, triangles_of(context.run)
        ranks_L = np.array([of_matrix(triangle) for triangle in np.asarray(self._triangles(context.params, batch))])
        return {"effective_rank": ranks_L.mean(), "smallest_effective_rank": ranks_L.min()}


def triangles_of(run: Run) -> Callable:
    """Return a jitted function of parameters and a batch: `triangles` of the layers' hidden units.

    A model whose only units are those of routed experts has the rank of their output instead.
    """
    has_mlp = any(units.tap == HIDDEN for units in run.hidden_units)

    def of_layers(params, batch):
        with taps.record(HIDDEN if has_mlp else OUTPUT) as recorded:
            run.objective.evaluate(run.model(params), batch)
        (x,) = recorded.values()
        x_LMF = x.reshape(x.shape[0], -1, x.shape[-1]).astype(jnp.float32)
        return triangles(x_LMF[:, :: -(-x_LMF.shape[1] // TOKENS)])

    return jax.jit(of_layers, out_shardings=NamedSharding(run.mesh, PartitionSpec()))


def triangles(x_LMF: jax.Array) -> jax.Array:
    """Return R of X^T = QR for each layer's X: float32 [L, min(M, F), M].

    R is small and has the singular values of X. X X^T has their squares: float32 rounds away the squares of values
    below 0.0003 of the largest.
    """
    return jax.lax.map(lambda x_MF: jnp.linalg.qr(x_MF.T, mode="r"), x_LMF)


def of_matrix(x: np.ndarray) -> float:
    """Return the effective rank of a matrix; 0 if it is zero."""
    singular = np.linalg.svd(x.astype(np.float64), compute_uv=False)
    if not singular.any():
        return 0.0
    shares = singular[singular > 0] / singular.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))
