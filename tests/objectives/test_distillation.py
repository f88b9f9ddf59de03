# SPDX-License-Identifier: Apache-2.0
"""The objective with a teacher has the parts and the weights that its keys name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import base
from layers.projection import Projection
from objectives import distillation, language_modeling
from parallelism.mesh import mesh_context
from tests.support import assert_close, make_model, model_config, one_device_mesh, packed_batch

T, EXPERTS = 16, dict(num_experts=4, experts_per_token=2)
KEYS = dict(divergence="reverse", temperature=3.0, soft_weight=0.7, hard_weight=0.3, hidden_weight=0.2)


def streams(model, batch):
    return model(batch["tokens"], batch["positions"], batch["segments"])[0]


def scaled(x):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True))


def test_the_loss_is_the_sum_of_its_terms_each_by_its_key():
    """Cross-entropy and z-loss, divergence by temperature squared, distance of the streams, losses of the routers."""
    config = base.get_config()
    config.model = model_config(num_layers=1, logit_soft_cap=8.0, **EXPERTS)
    teacher_config = model_config(num_layers=1, embed_dim=12, logit_soft_cap=9.0)
    config.train.update(global_batch=2, sequence_length=T, z_loss=0.1, balance_loss=0.05, router_z_loss=0.01)
    config.distillation.update(KEYS)
    batch = packed_batch([[9, 4], [12]], T, 37)
    weights = batch["segments"] > 0
    student, teacher = (nnx.merge(*make_model(of)) for of in (config.model, teacher_config))
    student.projection = Projection(in_dim=20, out_dim=12, rngs=nnx.Rngs(0))
    objective = distillation.make(config).chunked(2)
    alone = language_modeling.make(config)

    @jax.jit
    def observed():
        of_student, of_teacher = streams(student, batch), streams(teacher, batch)
        logits = student.logits(of_student), teacher.logits(of_teacher)
        losses = objective.loss(student, {}, batch, None, teacher=teacher), alone.loss(student, {}, batch, None)
        return losses, logits, (student.projection(of_student), of_teacher)

    with mesh_context(one_device_mesh()):
        losses, (logits, taught), (projected, wanted) = observed()
    ((total, weight), (_, scalars)), ((whole, _), (_, plain)) = losses
    log_z = jax.nn.logsumexp(logits, axis=-1)
    loss = log_z - np.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    q, p = (jax.nn.log_softmax(of / 3.0) for of in (logits, taught))
    divergence = jnp.sum(jnp.exp(q) * (q - p), axis=-1)
    distance = jnp.mean((scaled(projected) - scaled(wanted)) ** 2, axis=-1)
    of_routers = whole - jnp.sum(weights * (loss + 0.1 * log_z**2))
    per_token = 0.3 * (loss + 0.1 * log_z**2) + 0.7 * 3.0**2 * divergence + 0.2 * distance
    assert weight == weights.sum() and of_routers > 0.01 * whole
    assert_close(total, jnp.sum(weights * per_token) + of_routers)
    told = {"loss": loss, "divergence": divergence, "hidden_distance": distance}
    for name, of_token in told.items():
        assert_close(scalars[name], (jnp.sum(weights * of_token), weight))
    assert scalars.keys() - told.keys() == plain.keys() - {"loss"}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("is_masked_in_both", [False, True])
def test_a_word_that_the_teacher_excludes_leaves_the_loss_and_its_gradient_numbers(reverse, is_masked_in_both):
    """0 log 0 is 0; only a student that a reverse divergence asks for excluded words is infinitely far away."""
    student = jnp.array([[[1.0, 2.0, 0.5, -jnp.inf if is_masked_in_both else 0.3]]])
    teacher = jnp.array([[[1.0, 1.0, 0.5, -jnp.inf]]])
    config = base.get_config()
    config.distillation.update(
        divergence="reverse" if reverse else "forward", temperature=2.0, soft_weight=1.0, hard_weight=0.0
    )
    objective, targets = distillation.make(config), jnp.zeros((1, 1), int)
    found = jax.value_and_grad(objective.of_logits)(student, teacher, targets, jnp.ones((1, 1)))
    if reverse and not is_masked_in_both:
        assert found[0] == jnp.inf
        return

    def of_the_words_left(student):
        q, p = (jax.nn.softmax(of[0, 0] / 2)[:3] for of in (student, teacher))
        first, second = (q, p) if reverse else (p, q)
        return 4 * jnp.sum(first * jnp.log(first / second))

    assert_close(found, jax.value_and_grad(of_the_words_left)(student))


def test_logits_and_tokens_of_a_caller_are_never_broadcast():
    rng = np.random.default_rng(0)
    student, teacher = (rng.normal(size=(2, 3, 5)) for _ in range(2))
    targets, mask = rng.integers(0, 5, (2, 3)), np.array([[1, 1, 0], [1, 0, 0]])
    objective = distillation.make(base.get_config())
    loss = objective.of_logits(student, teacher, targets, mask)
    assert_close(objective.of_logits(*(x.tolist() for x in (student, teacher, targets, mask))), loss)
    assert_close(objective.of_logits(student, teacher, np.where(mask, targets, -100), np.ones((2, 3))), loss)
    for wrong, message in (
        ((student, teacher, targets, mask[:1]), r"mask: \[B, T\] is \[1, 3\], and that of the logits is \[2, 3\]"),
        ((student, teacher, targets[:, :2], mask), r"targets: \[B, T\] is \[2, 2\]"),
        ((student, teacher[:1], targets, mask), r"logits are \[2, 3, 5\] and \[1, 3, 5\]; give both as \[B, T, V\]"),
        ((student, teacher[..., :1], targets, mask), r"logits are \[2, 3, 5\] and \[2, 3, 1\]"),
        ((student[0], teacher[0], targets[0], mask[0]), r"logits are \[3, 5\] and \[3, 5\]"),
        ((student, teacher, targets, mask, (student, teacher[:1])), r"streams: \[B, T\] is \[1, 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            objective.of_logits(*wrong)
