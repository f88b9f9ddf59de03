# SPDX-License-Identifier: Apache-2.0
"""The loss of direct preference optimisation is equation 7 of arXiv:2305.18290, answer by answer."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from configs.base import get_config
from configs.errors import ConfigError
from objectives.dpo import DPO
from settings import preference
from tests.support import assert_close, forward, make_model, model_config, packed_batch, random_weights

BETA = 0.3
PROMPTS = ((3, 3), (2, 4), (1, 1))  # tokens of the prompts that are not targets, of each row
ANSWERS = ((5, 3), (4, 2), (1, 6))  # and of the answers


def pairs() -> dict:
    """Return three pairs; a prompt's tokens are targets that do not count."""
    sizes = [[sum(side) for side in zip(*row, strict=True)] for row in zip(PROMPTS, ANSWERS, strict=True)]
    batch = packed_batch(sizes, 16, 37)
    of_side = np.take_along_axis(np.array([(0, *row) for row in PROMPTS]), batch["segments"], axis=1)
    return batch | {"targets": np.where(batch["positions"] >= of_side, batch["targets"], -1)}


@functools.cache
def models():
    """Return the graph of a decoder, and parameters of a policy and of a reference."""
    graph, params = make_model(model_config(logit_soft_cap=5.0))
    return graph, params, random_weights(params, seed=1)


def loss(params, reference, batch):
    graph = models()[0]
    objective = DPO(3, 16, num_chunks=4, vocab_size=37, beta=BETA)
    (total, weight), (_, scalars) = objective.loss(
        nnx.merge(graph, params), {}, batch, None, reference=nnx.merge(graph, reference)
    )
    return total, (weight, scalars)


def answers(params, batch) -> np.ndarray:
    """Return log p(answer | prompt) in float64 [rows, 2], each pair's sides one after the other."""
    logits = np.asarray(forward(models()[0], params, batch), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    log_p = np.take_along_axis(log_p, np.maximum(batch["targets"], 0)[..., None], axis=-1)[..., 0]
    counts = batch["targets"] >= 0
    return np.stack([(log_p * counts * (batch["segments"] == side)).sum(1) for side in (1, 2)], axis=1)


def test_loss_accuracy_and_margin_are_those_of_the_paper():
    _, params, reference = models()
    batch = pairs()
    total, (weight, scalars) = jax.jit(loss)(params, reference, batch)
    rewards = BETA * (answers(params, batch) - answers(reference, batch))
    margins = rewards[:, 0] - rewards[:, 1]
    assert 0 < (margins > 0).sum() < 3  # else the signs would not be seen
    assert_close(total, np.log(1 + np.exp(-margins)).sum())
    assert_close(
        scalars,
        {"loss": (total, 3), "accuracy": ((margins > 0).sum(), 3), "margin": (margins.sum(), 3), "tokens": (21, 0)},
    )
    assert weight == 3


def test_gradients_are_those_of_the_plain_form():
    graph, params, reference = models()
    batch = pairs()

    def plain(params):
        sides = []
        for side in (1, 2):
            counts = (batch["targets"] >= 0) & (batch["segments"] == side)
            ratios = []
            for weights in (params, reference):
                log_p = jax.nn.log_softmax(forward(graph, weights, batch))
                of_target = np.maximum(batch["targets"], 0)[..., None]
                ratios.append((jax.numpy.take_along_axis(log_p, of_target, axis=-1)[..., 0] * counts).sum(1))
            sides.append(BETA * (ratios[0] - ratios[1]))
        return -jax.nn.log_sigmoid(sides[0] - sides[1]).sum()

    actual = jax.jit(jax.grad(lambda params: loss(params, reference, batch)[0]))(params)
    assert_close(actual, jax.jit(jax.grad(plain))(params))


def test_against_itself_the_loss_is_log_2_and_a_pair_without_an_answer_weighs_nothing():
    _, params, _ = models()
    batch = pairs()
    total, (weight, scalars) = jax.jit(loss)(params, params, batch)
    assert weight == 3 and abs(float(total) / 3 - np.log(2)) < 1e-6 and scalars["accuracy"][0] == 1.5
    cut = batch | {"targets": np.where((np.arange(3) == 1)[:, None] & (batch["segments"] == 2), -1, batch["targets"])}
    total, (weight, _) = jax.jit(loss)(params, params, cut)
    assert weight == 2 and abs(float(total) / 2 - np.log(2)) < 1e-6


def test_pairs_are_for_dpo_and_for_objectives_that_were_added():
    """Ours would train on both answers alike; one of a user's own may be another loss of pairs."""
    config = get_config()
    config.data.source = "preferences"
    for allowed in ("dpo", "mine"):
        config.train.objective, config.train.init_from = allowed, "runs/first"
        preference.check_source(config)
        preference.to_evaluate(config)
        assert config.train.objective == allowed
    config.train.objective = "language_modeling"
    with pytest.raises(ConfigError, match=r"^data.source=preferences does not go with train.objective=language_model"):
        preference.check_source(config)


def test_only_the_model_that_is_trained_has_dropout():
    """A reference with dropout would be another one in each step."""
    keys = {}

    class Keys(DPO):
        def log_probabilities(self, model, batch, key):
            keys[model] = key
            return np.zeros((3, 16), np.float32)

    Keys(3, 16, vocab_size=37).loss("trained", {}, pairs(), "key", reference="reference")
    assert keys == {"trained": "key", "reference": None}
