# SPDX-License-Identifier: Apache-2.0
"""The language-modelling objective: what is summed, and what weighs."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from objectives import language_modeling
from tests.support import assert_close, forward, make_model, model_config, packed_batch


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_sums_run_over_real_tokens_and_z_loss_is_minimised_but_not_reported(z_loss):
    graph, params = make_model(model_config(logit_soft_cap=5.0))
    batch = packed_batch([[4, 5], [3, 2]], 12, 37)
    loss = language_modeling.LanguageModeling(0, 0, 3, z_loss).loss
    evaluate = jax.jit(lambda params: loss(nnx.merge(graph, params), {"kept": 1}, batch, jax.random.key(0)))
    (total, weight), (carry, scalars) = evaluate(params)

    logits = np.asarray(forward(graph, params, batch), np.float64)
    log_z = np.log(np.exp(logits).sum(-1))
    losses = log_z - np.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    real = batch["segments"] > 0
    assert int(weight) == real.sum() == 14
    assert carry == {"kept": 1}
    assert_close(total, (losses + z_loss * log_z**2)[real].sum())
    assert_close(scalars, {"loss": (losses[real].sum(), 14)})


def test_a_target_of_minus_one_weighs_nothing_and_is_read_all_the_same():
    """As of what a user says in a conversation: the model sees it, and is not asked for it."""
    graph, params = make_model(model_config())
    batch = packed_batch([[4, 5], [3, 2]], 12, 37)
    asked = batch["positions"] >= 2
    loss = language_modeling.LanguageModeling(0, 0, 3, 0.0).loss
    some = batch | {"targets": np.where(asked, batch["targets"], -1)}
    (total, weight), _ = jax.jit(lambda params: loss(nnx.merge(graph, params), {}, some, None))(params)
    logits = np.asarray(forward(graph, params, batch), np.float64)
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    assert int(weight) == asked.sum() == 6
    assert_close(total, losses[asked].sum())


def test_a_batch_of_padding_weighs_nothing():
    graph, params = make_model(model_config())
    batch = packed_batch([[], []], 12, 37)
    loss = language_modeling.LanguageModeling(0, 0, 1, 0.1).loss
    (total, weight), _ = jax.jit(lambda params: loss(nnx.merge(graph, params), {}, batch, None))(params)
    assert total == weight == 0


def test_the_key_is_of_the_dropout_and_without_one_nothing_is_dropped():
    graph, params = make_model(model_config(dropout=0.3))
    plain, _ = make_model(model_config())
    batch = packed_batch([[4, 5], [3, 2]], 12, 37)
    loss = language_modeling.LanguageModeling(0, 0, 1, 0.0).loss

    @functools.partial(jax.jit, static_argnames="graph")
    def total(graph, key):
        return loss(nnx.merge(graph, params), {}, batch, key)[0][0]

    first, again, other = (total(graph, jax.random.key(seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert total(graph, None) == total(plain, None) == total(plain, jax.random.key(0)) != first


def test_language_models_carry_nothing_from_step_to_step():
    assert language_modeling.LanguageModeling(2, 3).init_carry(None, 2, None) == {}


def test_held_out_losses_are_of_capped_logits_without_z_loss():
    graph, params = make_model(model_config(logit_soft_cap=5.0))
    batch = packed_batch([[4, 5], [3, 2]], 12, 37)
    objective = language_modeling.LanguageModeling(0, 0, 3, z_loss=0.1)
    logits = np.asarray(forward(graph, params, batch), np.float64)
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    found = jax.jit(lambda params: objective.evaluate(nnx.merge(graph, params), batch))(params)
    assert_close(found, {"loss": (losses[batch["segments"] > 0].sum(), 14)})
