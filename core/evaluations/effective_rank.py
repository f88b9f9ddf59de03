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
        """Measure every `every` steps."""
        self.every = every
        self._run = self._grams = None  # the last run, and the program that is compiled for it

    def evaluate(self, context):
        """Return `effective_rank`, the mean over layers, and `smallest_effective_rank`."""
        if context.stop():
            return None
        batch = next(heldout_batches(context.run, context.corpus, 1, context.on_lost))
        if context.run is not self._run:
            self._run, self._grams = context.run, grams_of(context.run)
        ranks_L = of_batch(self._grams, context.params, batch)
        return {"effective_rank": ranks_L.mean(), "smallest_effective_rank": ranks_L.min()}


def of_batch(grams: Callable, params: dict, batch: dict) -> np.ndarray:
    """Return the effective rank of the hidden units of each layer, float64 [L], on one batch; padding counts."""
    return np.array([of_gram(gram) for gram in np.asarray(grams(params, batch))])


def grams_of(run: Run) -> Callable:
    """Return a jitted function of parameters and a batch: X X^T of each layer's hidden units, float32 [L, M, M].

    A model whose only units are those of routed experts has the rank of their output instead.
    """
    has_mlp = any(units.tap == HIDDEN for units in run.hidden_units)

    def grams(params, batch):
        with taps.record(HIDDEN if has_mlp else OUTPUT) as recorded:
            run.objective.evaluate(run.model(params), batch)
        (x,) = recorded.values()
        x_LMF = x.reshape(x.shape[0], -1, x.shape[-1]).astype(jnp.float32)
        x_LMF = x_LMF[:, :: -(-x_LMF.shape[1] // TOKENS)]
        return jnp.einsum("lmf,lnf->lmn", x_LMF, x_LMF, precision=jax.lax.Precision.HIGHEST)

    return jax.jit(grams, out_shardings=NamedSharding(run.mesh, PartitionSpec()))


def of_gram(gram: np.ndarray) -> float:
    """Return the effective rank of a matrix X from X X^T; 0 if X is zero."""
    singular = np.sqrt(np.maximum(np.linalg.eigvalsh(gram.astype(np.float64)), 0))
    if not singular.any():
        return 0.0
    shares = singular[singular > 0] / singular.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))
