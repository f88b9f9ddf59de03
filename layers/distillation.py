# SPDX-License-Identifier: Apache-2.0
"""The loss of a student's logits against targets and against a teacher's logits, without all logits in memory.

Tokens go through both heads in chunks, and the vocabulary in parts. A first pass over the parts computes the sums of a
token's softmax and divergence; a second pass computes the gradient part by part. Distillation: arXiv:1503.02531,
section 2, with the divergence times temperature^2; reverse: arXiv:2306.08543, equation 1. The student's letters: B
batch, T length of a chunk, D embed, V words of a part; the teacher's width has none.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from layers.attention.attention import soft_cap
from layers.cross_entropy import chunks, merged
from layers.products import einsum_f32

NO_WORD = -1e9  # the logit of padding; its exponential is 0, and its square is finite


class LossTerms(NamedTuple):
    """The loss: hard_weight * (cross-entropy + z_loss * log(Z)^2) + soft_weight * temperature^2 * divergence.

    The divergence is KL(teacher || student), both at `temperature`.
    """

    hard_weight: float
    soft_weight: float
    temperature: float
    reverse: bool  # KL(student || teacher) in its place
    num_chunks: int = 1  # divides the length; a chunk takes every num_chunks-th token
    num_parts: int = 1  # of the vocabulary; a part takes every num_parts-th word
    z_loss: float = 0.0
    logit_cap: float = 0.0  # soft cap of the logits, 0 for none
    teacher_cap: float = 0.0  # that of the teacher's


class Sums(NamedTuple):
    """Sums of each token's logits over the vocabulary: float32 [B, T] each."""

    log_z: jax.Array  # log-sum of the student's exponentials, at temperature 1
    target: jax.Array  # the student's logit of the target
    first: jax.Array  # log-sum at LossTerms.temperature, of the distribution that the divergence takes its mean over
    second: jax.Array  # the same of the other
    mean: jax.Array  # by the first distribution, of its logits less those of the other, over the temperature

    @property
    def divergence(self) -> jax.Array:
        """KL(first || second)."""
        return self.mean - self.first + self.second


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def distillation_loss(
    x: jax.Array, head_DV: jax.Array, teacher_x: jax.Array, teacher_head: jax.Array, targets: jax.Array,
    weights: jax.Array, terms: LossTerms,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Return float32 sums over tokens of weight * the loss of `terms`, weight * cross-entropy, weight * divergence.

    Only the first is differentiable, with respect to `x` and `head_DV`.

    Args:
      x: [B, T, D] in the compute type.
      head_DV: [D, V]; cast to the type of `x`.
      teacher_x: [B, T, its width], and `teacher_head` [its width, V].
      targets: int [B, T].
      weights: float32 [B, T].
    """
    parts = _parts(head_DV.astype(x.dtype), teacher_head.astype(teacher_x.dtype), terms.num_parts)

    def body(sums, chunk):
        return jax.tree.map(jnp.add, sums, _totals(_sums(chunk, parts, terms), chunk, terms)), None

    return jax.lax.scan(body, (jnp.float32(0),) * 3, chunks(terms.num_chunks, x, teacher_x, targets, weights))[0]


def _parts(head: jax.Array, teacher_head: jax.Array, num_parts: int) -> tuple:
    """Return (words that exist, head [num_parts, D, V / num_parts], that of the teacher), of each part.

    A vocabulary that is not a multiple of the parts is padded with words that do not exist, and are -1.
    """
    words = jnp.arange(head.shape[1])
    padded = [jnp.pad(h, ((0, 0), (0, -h.shape[1] % num_parts))) for h in (head, teacher_head)]
    words = jnp.pad(words, (0, -len(words) % num_parts), constant_values=-1).reshape(-1, num_parts).T
    return words, *(jnp.moveaxis(h.reshape(len(h), -1, num_parts), 2, 0) for h in padded)


def _logits(chunk: tuple, part: tuple, terms: LossTerms) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return float32 logits of student and teacher for the words of a part, and which word is the target."""
    (x_BTD, teacher_x, targets_BT, _), (words_V, head_DV, teacher_head) = chunk, part
    student_BTV = soft_cap(einsum_f32("BTD,DV->BTV", x_BTD, head_DV), terms.logit_cap)
    teacher_BTV = soft_cap(einsum_f32("BTD,DV->BTV", teacher_x, teacher_head), terms.teacher_cap)
    student_BTV, teacher_BTV = (jnp.where(words_V < 0, NO_WORD, logits) for logits in (student_BTV, teacher_BTV))
    return student_BTV, teacher_BTV, words_V == jnp.maximum(targets_BT, 0)[..., None]


def _in_order(student_BTV, teacher_BTV, terms: LossTerms) -> tuple[jax.Array, jax.Array]:
    """Return logits over the temperature: first those of the divergence's mean, then the other ones."""
    pair = (student_BTV, teacher_BTV) if terms.reverse else (teacher_BTV, student_BTV)
    return pair[0] / terms.temperature, pair[1] / terms.temperature


def _sums(chunk: tuple, parts: tuple, terms: LossTerms) -> Sums:
    """Return the sums over all parts of the vocabulary for each token of a chunk."""

    def body(sums: Sums, part):
        student_BTV, teacher_BTV, is_target_BTV = _logits(chunk, part, terms)
        first_BTV, second_BTV = _in_order(student_BTV, teacher_BTV, terms)
        first_BT = jnp.logaddexp(sums.first, jax.nn.logsumexp(first_BTV, axis=-1))
        share_BTV = jnp.exp(first_BTV - first_BT[..., None])
        return Sums(
            log_z=jnp.logaddexp(sums.log_z, jax.nn.logsumexp(student_BTV, axis=-1)),
            target=sums.target + jnp.where(is_target_BTV, student_BTV, 0).sum(axis=-1),
            first=first_BT,
            second=jnp.logaddexp(sums.second, jax.nn.logsumexp(second_BTV, axis=-1)),
            mean=sums.mean * jnp.exp(sums.first - first_BT) + (share_BTV * (first_BTV - second_BTV)).sum(axis=-1),
        ), None

    nothing, zero = jnp.full(chunk[2].shape, -jnp.inf), jnp.zeros(chunk[2].shape)
    return jax.lax.scan(body, Sums(nothing, zero, nothing, nothing, zero), parts)[0]


def _totals(sums: Sums, chunk: tuple, terms: LossTerms) -> tuple[jax.Array, jax.Array, jax.Array]:
    weights_BT, loss_BT = chunk[3], sums.log_z - sums.target
    hard_BT = terms.hard_weight * (loss_BT + terms.z_loss * sums.log_z**2)
    soft_BT = terms.soft_weight * terms.temperature**2 * sums.divergence
    return tuple(jnp.sum(weights_BT * of_token) for of_token in (hard_BT + soft_BT, loss_BT, sums.divergence))


def _slope(student_BTV, teacher_BTV, is_target_BTV, sums: Sums, terms: LossTerms) -> jax.Array:
    """Return the derivative of a token's total by the student's logits of a part, before their cap."""
    first_BTV, second_BTV = _in_order(student_BTV, teacher_BTV, terms)
    first_BTV, second_BTV = first_BTV - sums.first[..., None], second_BTV - sums.second[..., None]
    if terms.reverse:
        soft_BTV = jnp.exp(first_BTV) * (first_BTV - second_BTV - sums.divergence[..., None])
    else:
        soft_BTV = jnp.exp(second_BTV) - jnp.exp(first_BTV)
    certain_BT = 1 + 2 * terms.z_loss * sums.log_z
    hard_BTV = certain_BT[..., None] * jnp.exp(student_BTV - sums.log_z[..., None]) - is_target_BTV
    slope_BTV = terms.hard_weight * hard_BTV + terms.soft_weight * terms.temperature * soft_BTV
    return slope_BTV * (1 - (student_BTV / terms.logit_cap) ** 2) if terms.logit_cap else slope_BTV


def _forward(x, head_DV, teacher_x, teacher_head, targets, weights, terms: LossTerms):
    """Return the sums, and as residuals the gradients of `x` and `head_DV`."""
    parts = _parts(head_DV.astype(x.dtype), teacher_head.astype(teacher_x.dtype), terms.num_parts)

    def of_chunk(carry, chunk):
        totals, head_gradient = carry
        sums = _sums(chunk, parts, terms)

        def of_part(x_gradient_BTD, part):
            slope_BTV = chunk[3][..., None] * _slope(*_logits(chunk, part, terms), sums, terms)
            slope_BTV = slope_BTV.astype(x.dtype)
            x_gradient_BTD += einsum_f32("BTV,DV->BTD", slope_BTV, part[1])
            return x_gradient_BTD, einsum_f32("BTD,BTV->DV", chunk[0], slope_BTV)

        x_gradient, of_parts = jax.lax.scan(of_part, jnp.zeros(chunk[0].shape, jnp.float32), parts)
        totals = jax.tree.map(jnp.add, totals, _totals(sums, chunk, terms))
        return (totals, head_gradient + of_parts), x_gradient.astype(x.dtype)

    start = (jnp.float32(0),) * 3, jnp.zeros(parts[1].shape, jnp.float32)
    (totals, head_gradient), x_gradient = jax.lax.scan(
        of_chunk, start, chunks(terms.num_chunks, x, teacher_x, targets, weights)
    )
    head_gradient = jnp.moveaxis(head_gradient, 0, 2).reshape(len(head_DV), -1)[:, : head_DV.shape[1]]
    return totals, (merged(x_gradient), head_gradient.astype(head_DV.dtype))


def _backward(terms: LossTerms, gradients, cotangents):
    scaled = [gradient * cotangents[0].astype(gradient.dtype) for gradient in gradients]
    return (*scaled, None, None, None, None)


distillation_loss.defvjp(_forward, _backward)
