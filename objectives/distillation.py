# SPDX-License-Identifier: Apache-2.0
"""Distillation from a frozen teacher: cross-entropy, divergence from its logits, distance of both streams.

The loss takes the teacher as an additional argument, a model with the same vocabulary. The reported and evaluated
`loss` is the student's cross-entropy. Logits: arXiv:1503.02531. Streams: arXiv:1909.10351, equation 8, here for the
normalised last streams, each scaled to a mean square of 1.
"""

import dataclasses

import jax
import jax.numpy as jnp

from layers import experts
from layers.distillation import How, distillation_loss
from objectives import language_modeling
from objectives.language_modeling import LanguageModeling, weights

LEAST_PARTS = 4  # of the vocabulary: then the logits and softmaxes of both models need the memory of one's logits
EPSILON = 1e-6  # added to mean squares


def make(config, *, num_chunks: int, teacher) -> "Distillation":
    """Return the objective of a configuration; see objectives/language_modeling.py for what it has.

    Args:
      teacher: the `model` section of the teacher's configuration.
    """
    keys, model = config.distillation, config.model
    parts = next(
        n for n in range(min(LEAST_PARTS, model.vocab_size), model.vocab_size + 1) if model.vocab_size % n == 0
    )
    how = How(
        keys.hard_weight, keys.soft_weight, keys.temperature, keys.divergence == "reverse", num_chunks, parts,
        config.train.z_loss, model.logit_soft_cap, teacher.logit_soft_cap,
    )  # fmt: skip
    student = language_modeling.make(config, num_chunks=num_chunks)
    return Distillation(**vars(student), how=how, hidden_weight=keys.hidden_weight)


@dataclasses.dataclass(frozen=True)
class Distillation(LanguageModeling):
    """The distillation loss; `hidden_weight` weighs the mean squared difference of the streams of both models."""

    how: How | None = None
    hidden_weight: float = 0.0

    def loss(self, model, carry, batch, key, teacher):
        """Return the loss; `key` is that of the student's dropout. The teacher has no dropout and no gradient."""
        inputs = batch["tokens"], batch["positions"], batch["segments"]
        stream_BTD, _, figures = model.forward_with_aux(*inputs, key=key)
        teacher_stream, _ = teacher(*inputs)
        weights_BT = weights(batch)
        weight = weights_BT.sum()
        total, loss_sum, divergence = distillation_loss(
            *model.head_inputs(stream_BTD), *teacher.head_inputs(teacher_stream), batch["targets"], weights_BT, self.how
        )
        scalars = {"loss": (loss_sum, weight), "divergence": (divergence, weight)}
        if self.hidden_weight:
            distance = jnp.sum(weights_BT * _distance(model.projection(stream_BTD), teacher_stream))
            total += self.hidden_weight * distance
            scalars["hidden_distance"] = (distance, weight)
        penalty, of_router = experts.router_losses(figures, balance_loss=self.balance_loss, z_loss=self.router_z_loss)
        return (total + penalty, weight), (carry, jax.lax.stop_gradient(scalars | of_router))

    def evaluate(self, model, batch, teacher=None) -> dict:
        """Return the student's cross-entropy; the teacher is not used."""
        return super().evaluate(model, batch)


def _distance(one: jax.Array, other: jax.Array) -> jax.Array:
    """Return the mean squared difference of two streams, each token's scaled to a mean square of 1: float32 [B, T]."""
    one, other = (
        x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + EPSILON)
        for x in (one.astype(jnp.float32), other.astype(jnp.float32))
    )
    return jnp.mean(jnp.square(one - other), axis=-1)
