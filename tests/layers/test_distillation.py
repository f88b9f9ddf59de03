# SPDX-License-Identifier: Apache-2.0
"""The chunked distillation loss equals the plain one, value and gradients, and holds no logits whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.distillation import LossTerms, distillation_loss
from tests.support import assert_close

B, T, D, V, TEACHER = 3, 12, 20, 42, 28


def inputs():
    rng = np.random.default_rng(0)
    x, head = (jnp.float32(rng.standard_normal(shape)) for shape in ((B, T, D), (D, V)))
    teacher = tuple(jnp.float32(rng.standard_normal(shape)) for shape in ((B, T, TEACHER), (TEACHER, V)))
    weights = jnp.float32(rng.random((B, T)) * (rng.random((B, T)) < 0.7))
    return x, head / 3, *teacher, rng.integers(0, V, (B, T)), weights


def capped(logits, cap):
    return cap * jnp.tanh(logits / cap) if cap else logits


def plain(x, head, teacher_x, teacher_head, targets, weights, terms):
    """Return the sums by the formulas, from whole logits."""
    student, teacher = capped(x @ head, terms.logit_cap), capped(teacher_x @ teacher_head, terms.teacher_cap)
    log_z = jax.nn.logsumexp(student, axis=-1)
    loss = log_z - jnp.take_along_axis(student, targets[..., None], axis=-1)[..., 0]
    p, q = (jax.nn.log_softmax(logits / terms.temperature) for logits in (teacher, student))
    p, q = (q, p) if terms.reverse else (p, q)
    divergence = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    total = terms.hard_weight * (loss + terms.z_loss * log_z**2) + terms.soft_weight * terms.temperature**2 * divergence
    return tuple(jnp.sum(weights * of_token) for of_token in (total, loss, divergence))


@pytest.mark.parametrize(
    "terms",
    [
        LossTerms(0.3, 0.7, 2.0, False, num_chunks=3, num_parts=7),
        LossTerms(0.3, 0.7, 2.0, True, num_chunks=4, num_parts=2, z_loss=0.1, logit_cap=5.0, teacher_cap=9.0),
        LossTerms(0.0, 1.0, 1.0, False, num_chunks=1, num_parts=3, logit_cap=3.0),
        LossTerms(0.3, 0.7, 2.0, False, num_parts=4, z_loss=0.1, logit_cap=5.0, teacher_cap=9.0),
        LossTerms(0.3, 0.7, 0.1, True, num_parts=5, logit_cap=5.0),
    ],
    ids=["forward", "reverse", "soft alone", "padded", "padded, reverse"],
)
def test_value_and_gradients_equal_the_plain_form(terms):
    x, head, *rest = inputs()

    def graded(loss):
        return jax.jit(
            jax.value_and_grad(
                lambda x, head: (lambda sums: (2.5 * sums[0], sums))(loss(x, head, *rest, terms)), (0, 1), True
            )
        )

    actual = graded(distillation_loss)(x, head)
    assert_close(actual, graded(plain)(x, head))
    assert_close(jax.jit(distillation_loss, static_argnums=6)(x, head, *rest, terms), actual[0][1])


@pytest.mark.parametrize("reverse", [False, True])
def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient(reverse):
    x, head, _, _, targets, weights = inputs()
    terms = LossTerms(0.0, 1.0, 2.0, reverse, num_chunks=2, num_parts=2)
    loss = jax.jit(
        jax.value_and_grad(
            lambda x, head: distillation_loss(x, head, *inputs()[:2], targets, weights, terms)[0], (0, 1)
        )
    )
    value, gradients = loss(x, head)
    assert abs(value) < 1e-4 and max(float(jnp.abs(g).max()) for g in gradients) < 1e-5  # float32 sums of 20 tokens


def test_the_gradient_is_of_one_size_at_any_high_temperature():
    """What temperature^2 is for (arXiv:1503.02531, section 2)."""
    x, head, *rest = inputs()

    def norm(temperature):
        terms = LossTerms(0.0, 1.0, temperature, False)
        return jnp.linalg.norm(jax.jit(jax.grad(lambda x: distillation_loss(x, head, *rest, terms)[0]))(x))

    assert abs(norm(200.0) / norm(400.0) - 1) < 0.02


def test_temporary_memory_is_that_of_a_part_of_a_chunk():
    """Plainly, the float32 logits of 4 x 64 tokens over 4,096 words are 4 MiB, of student and teacher each."""
    shape = jax.ShapeDtypeStruct
    batch, length, width, vocabulary = 4, 64, 8, 4096
    arguments = (
        shape((batch, length, width), jnp.float32), shape((width, vocabulary), jnp.float32),
        shape((batch, length, width), jnp.float32), shape((width, vocabulary), jnp.float32),
        shape((batch, length), jnp.int32), shape((batch, length), jnp.float32),
    )  # fmt: skip
    terms = LossTerms(0.5, 0.5, 2.0, False, num_chunks=8, num_parts=4)
    loss = jax.jit(jax.grad(lambda *inputs: distillation_loss(*inputs, terms)[0], (0, 1)))
    temporary = loss.lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    heads = 4 * 4 * width * vocabulary  # in parts, and the gradient of one
    assert temporary < heads + 4 * batch * length * vocabulary / 2
