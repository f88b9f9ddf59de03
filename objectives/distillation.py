# SPDX-License-Identifier: Apache-2.0
"""Distillation from a frozen teacher: cross-entropy, divergence from its logits, distance of both streams.

The teacher is a model with the same vocabulary. The reported and evaluated `loss` is the student's cross-entropy.
Logits: arXiv:1503.02531. Streams: arXiv:1909.10351, equation 8, here for the normalised last streams, each scaled to a
mean square of 1.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from layers.distillation import LossTerms, distillation_loss
from layers.experts import experts
from layers.projection import Projection
from objectives import language_modeling
from objectives.language_modeling import LanguageModeling, loss_mask
from objectives.objective import FrozenModel

NUM_PARTS = 4  # of the vocabulary: then the logits and softmaxes of both models need the memory of one's logits
EPSILON = 1e-6  # added to mean squares


def make(config) -> "Distillation":
    """Return the objective of a configuration."""
    keys = config.distillation
    terms = LossTerms(
        keys.hard_weight, keys.soft_weight, keys.temperature, keys.divergence == "reverse", num_parts=NUM_PARTS,
        z_loss=config.train.z_loss,
    )  # fmt: skip
    return Distillation(**vars(language_modeling.make(config)), terms=terms, hidden_weight=keys.hidden_weight)


@dataclasses.dataclass(frozen=True)
class Distillation(LanguageModeling):
    """The distillation loss; `hidden_weight` weighs the mean squared difference of the streams of both models."""

    terms: LossTerms | None = None
    hidden_weight: float = 0.0

    def frozen_models(self) -> tuple[FrozenModel, ...]:
        """Return the teacher."""
        return (FrozenModel("teacher", "distillation.teacher"),)

    def transform(self, model: nnx.Module, rngs: nnx.Rngs, *, teacher: nnx.Module) -> nnx.Module:
        """Add a projection to the teacher's width to the student, if the loss compares their streams."""
        if self.hidden_weight:
            model.projection = Projection(in_dim=model.embed_dim, out_dim=teacher.embed_dim, rngs=rngs)
        return model

    def loss(self, model, carry, batch, key, *, teacher):
        """Return the loss; `key` is that of the student's dropout. The teacher has no dropout and no gradient."""
        inputs = batch["tokens"], batch["positions"], batch["segments"]
        stream_BTD, _, figures = model.forward_with_aux(*inputs, key=key)
        teacher_stream, _ = teacher(*inputs)
        weights_BT = loss_mask(batch)
        weight = weights_BT.sum()
        terms = self.terms._replace(
            num_chunks=self.num_chunks, logit_cap=model.logit_cap, teacher_cap=teacher.logit_cap
        )  # fmt: skip
        total, loss_sum, divergence = distillation_loss(
            *model.head_inputs(stream_BTD), *teacher.head_inputs(teacher_stream), batch["targets"], weights_BT, terms
        )
        scalars = {"loss": (loss_sum, weight), "divergence": (divergence, weight)}
        if self.hidden_weight:
            distance = jnp.sum(weights_BT * stream_distance(model.projection(stream_BTD), teacher_stream))
            total += self.hidden_weight * distance
            scalars["hidden_distance"] = (distance, weight)
        penalty, of_router = experts.router_losses(figures, balance_loss=self.balance_loss, z_loss=self.router_z_loss)
        return (total + penalty, weight), (carry, jax.lax.stop_gradient(scalars | of_router))

    def of_logits(self, student_logits, teacher_logits, targets, mask, streams: tuple | None = None) -> jax.Array:
        """Return the mean loss of the tokens of a mask, float32, for a caller's own loop, which has all logits.

        No gradient reaches the teacher's arrays. A word with a logit of -inf has no part in the model's distribution.

        Args:
          student_logits, teacher_logits: [B, T, V].
          targets: int [B, T]; one below 0 has no loss.
          mask: [B, T], 0 for tokens to leave out.
          streams: [B, T, D] of the student and of the teacher, of one width; None: their distance does not count.

        Raises:
          ValueError: the shapes differ.
        """
        logits = [jnp.asarray(one, jnp.float32) for one in (student_logits, teacher_logits)]
        targets, mask = jnp.asarray(targets), jnp.asarray(mask)
        streams = None if streams is None else [jnp.asarray(stream) for stream in streams]
        _check_shapes(*logits, targets, mask, streams or ())
        return self._of_logits(*logits, jnp.maximum(targets, 0), (mask != 0) & (targets >= 0), streams)

    def _of_logits(
        self, student_BTV: jax.Array, teacher_BTV: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array, streams
    ) -> jax.Array:  # fmt: skip
        terms, teacher_BTV = self.terms, jax.lax.stop_gradient(teacher_BTV)
        pair = [jax.nn.log_softmax(logits / terms.temperature) for logits in (teacher_BTV, student_BTV)]
        first_BTV, second_BTV = pair[::-1] if terms.reverse else pair
        share_BTV = jnp.exp(first_BTV)
        difference_BTV = jnp.where(share_BTV > 0, first_BTV - second_BTV, 0)  # 0 log 0 = 0
        divergence_BT = jnp.sum(share_BTV * difference_BTV, axis=-1)
        log_z_BT = jax.nn.logsumexp(student_BTV, axis=-1)
        hard_BT = log_z_BT - jnp.take_along_axis(student_BTV, targets_BT[..., None], axis=-1)[..., 0]
        loss_BT = terms.hard_weight * (hard_BT + terms.z_loss * log_z_BT**2)
        loss_BT += terms.soft_weight * terms.temperature**2 * divergence_BT
        if streams is not None:
            loss_BT += self.hidden_weight * stream_distance(streams[0], jax.lax.stop_gradient(streams[1]))
        return jnp.where(mask_BT, loss_BT, 0).sum() / jnp.maximum(mask_BT.sum(), 1)


def _check_shapes(student_logits, teacher_logits, targets, mask, streams) -> None:
    """Raise ValueError unless the arrays of `of_logits` have the shapes that it names; none is broadcast."""
    shape = student_logits.shape
    if len(shape) != 3 or teacher_logits.shape != shape:
        raise ValueError(f"logits are {list(shape)} and {list(teacher_logits.shape)}; give both as [B, T, V]")
    named = (("targets", targets.shape), ("mask", mask.shape), *(("streams", one.shape[:-1]) for one in streams))
    for name, found in named:
        if found != shape[:2]:
            raise ValueError(f"{name}: [B, T] is {list(found)}, and that of the logits is {list(shape[:2])}")
    widths = [stream.shape[-1] for stream in streams]
    if len(set(widths)) > 1:
        raise ValueError(
            f"streams of widths {widths[0]} and {widths[1]} need a projection, which a run learns; leave them out here"
        )


def stream_distance(one: jax.Array, other: jax.Array) -> jax.Array:
    """Return the mean squared difference of two streams, each token's scaled to a mean square of 1: float32 [B, T]."""
    one, other = (
        x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + EPSILON)
        for x in (one.astype(jnp.float32), other.astype(jnp.float32))
    )
    return jnp.mean(jnp.square(one - other), axis=-1)
